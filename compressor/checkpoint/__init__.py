"""Files: read strictly, written durably, listed in a manifest, owned by whoever wrote them."""
