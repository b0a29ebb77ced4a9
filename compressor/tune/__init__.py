"""`blr tune`: every variant of every structure timed on a GPU, and the rules that layers choose by."""
