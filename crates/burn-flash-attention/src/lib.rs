//! Exact blockwise (flash) attention for Burn tensors, forward and backward.

mod composed;
