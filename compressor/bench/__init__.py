"""`blr bench`: how fast layers and models are here, beside what they could be replaced by.

harness.py            arms × cases: each checked, then timed in turn, a row each
timing.py checks.py   rotating copies, CUDA graphs, cold L2, quartiles; no time without the right numbers
results.py options.py rows, reports, files and text; what each command is asked
shapes.py layers.py layer_problem.py    layers of published models, in every structure
models.py decode.py decode_arms.py prefill.py memory.py    whole models
"""
