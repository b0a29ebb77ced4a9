"""`blr bench`: how fast layers and models are here, beside what they could be replaced by.

harness.py            arms × cases: each checked, then timed in turn, a row each
timing.py checks.py   rotating copies, CUDA graphs, cold L2, quartiles; no time without the right numbers
results.py tables.py  rows, reports and files; reports as text
options.py            what each command is asked, which the command line is made of
shapes.py layers.py layer_problem.py kernel_timer.py float8.py
                      layers of published models, in every structure, on random numbers
models.py             random models and checkpoints
decode.py decode_arms.py prefill.py prefill_models.py memory.py
                      tokens a second, time to the first token, memory of a pass
"""
