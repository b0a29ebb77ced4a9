"""`blr bench`: how fast layers and kernels are here, beside everything they could be replaced by.

A *case* is one layer (or one Kronecker-sparse pattern) at one number of tokens and one precision. Its
*arms* are implementations that compute the same thing; they are sampled in turn, so that whatever
the machine does meanwhile happens to all of them.

    shapes.py patterns.py   what is timed: published layers and ranks, the published pattern grid
    layers.py kronecker.py  the arms of a layer and of a pattern
    subjects.py             random data, right output, our entry points and layouts
    peers.py                other implementations, loaded from a file
    gate.py precision.py    no time without the right numbers, in each precision
    timing.py               rotating copies, CUDA graphs, cold L2, interleaving, quartiles
    ceilings.py energy.py   what this GPU reaches; joules
    runner.py               takes the arms of a case through all that, and survives each
    session.py stopping.py  one run: machine, deadline, signals
    results.py summary.py plots.py   rows, files, tables, medians, pictures
"""
