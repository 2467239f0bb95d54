"""Evidence about GPU code on a machine without a GPU: run PTX, read machine code, mend Triton's interpreter."""
