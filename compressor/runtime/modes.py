"""How a decoder runs, by name; what the names mean is said by `decoder.Decoder`."""

MODES = ("auto", "graph", "eager")
FORMER = {"persistent": "graph"}  # modes of earlier versions, by what does their work
OPS = ("triton", "torch")
CACHES = ("whole", "int8")  # what is kept of keys and values
