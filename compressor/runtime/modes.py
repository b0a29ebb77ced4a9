"""How a decoder runs, by name; what the names mean is said by `decoder.Decoder`."""

MODES = ("auto", "graph", "persistent", "eager")
OPS = ("triton", "torch")
CACHES = ("whole", "int8")  # what is kept of keys and values
