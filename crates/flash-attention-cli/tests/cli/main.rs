//! The command line as a user runs it.

mod attn;
mod bench;
mod check;
mod devices;
mod ledger;
mod run;
mod run_errors;
mod tensors;
