//! A small causal transformer that learns to write, character by character.
//!
//! The model is built from Burn modules, trained by Burn's AdamW, and its attention is either
//! [`burn_flash_attention::flash_attention`] or Burn's own, so that the two can be compared on the
//! same weights and the same text. The program `train_char_lm` drives it from the command line.
//!
//! | module | holds |
//! |---|---|
//! | [`text`] | the vocabulary, the split into training and validation text, batches |
//! | [`model`] | the transformer |
//! | [`train`] | the training loop and the losses |
//! | [`sample`] | text drawn from a trained model |
//! | [`progress`] | the bar, the summary, the file of losses |
//! | [`memory`] | the peak memory of this process |

pub mod memory;
pub mod model;
pub mod progress;
pub mod sample;
pub mod text;
pub mod train;
