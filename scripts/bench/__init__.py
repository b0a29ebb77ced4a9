"""`blr bench` and `blr tune`: how fast layers and models are here, beside what could replace them.

harness.py            arms × cases: each checked, then timed in turn, a row each (its class says how
                      a table of such rows looks)
timing.py checks.py   rotating copies, CUDA graphs, cold L2, quartiles; no time without right numbers
results.py options.py reports, files and text; what each command is asked
shapes.py layers.py layer_problem.py
                      layers of published models, in every structure, on random numbers
models.py decode.py decode_arms.py prefill.py memory.py
                      whole models: tokens a second, time to the first token, memory of a pass
tune.py tuning.py tuning_rules.py
                      every variant of a kernel, and the rules that layers choose by
"""
