"""One optimizer step: packing, microbatches, exact normalisation, the optimizer."""
