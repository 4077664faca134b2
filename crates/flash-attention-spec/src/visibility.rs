//! Which keys a query sees.
//!
//! `causal` and `window` together leave a band of the score matrix: query `i` sees the keys
//! `i + offset - left ..= i + offset + right`. The predicates are plain integer functions that
//! CubeCL kernels call too, so that there is one definition for every device.
//! Rules that look at single elements (the mask) are intersected with the band by the caller.
// The attribute that makes a function callable from kernels adds undocumented items beside it.
#![cfg_attr(feature = "cube", allow(missing_docs))]

use crate::options::{Alignment, Options};
#[cfg(feature = "cube")]
use cubecl::prelude::*;
use std::ops::Range;

/// What `causal` and `window` leave visible, as three numbers.
///
/// An unbounded side is stored as a distance past every position, so that no caller needs a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Band {
    /// Key position of query 0.
    pub offset: i32,
    /// Keys visible before the query's own position.
    pub left: i32,
    /// Keys visible after the query's own position.
    pub right: i32,
}

impl Band {
    /// The band of `options` on sequences of the given lengths, each at most
    /// [`MAX_SEQUENCE`](crate::MAX_SEQUENCE).
    ///
    /// ```
    /// use flash_attention_spec::{Band, Options};
    ///
    /// let band = Band::new(2, 5, &Options::new().causal());
    /// assert_eq!(band.keys(0, 5), 0..4);
    /// assert_eq!(band.keys(1, 5), 0..5);
    /// assert_eq!(band.queries(4, 2), 1..2);
    /// ```
    pub fn new(seq_q: usize, seq_kv: usize, options: &Options) -> Self {
        let unbounded = seq_q + seq_kv;
        let side = |limit: Option<usize>| limit.unwrap_or(unbounded).min(unbounded) as i32;
        let right = if options.causal {
            Some(0)
        } else {
            options.window.right
        };
        Self {
            offset: match options.alignment {
                Alignment::BottomRight => seq_kv as i32 - seq_q as i32,
                Alignment::TopLeft => 0,
            },
            left: side(options.window.left),
            right: side(right),
        }
    }

    /// Keys of `0..seq_kv` that query `i` sees; empty where it sees none.
    pub fn keys(&self, i: usize, seq_kv: usize) -> Range<usize> {
        let first = first_key(i as i32, self.offset, self.left).max(0);
        let end = end_key(i as i32, self.offset, self.right).min(seq_kv as i32);
        first as usize..end.max(first) as usize
    }

    /// Queries of `0..seq_q` that see key `j`; empty where none does.
    pub fn queries(&self, j: usize, seq_q: usize) -> Range<usize> {
        let first = first_query(j as i32, self.offset, self.right).max(0);
        let end = end_query(j as i32, self.offset, self.left).min(seq_q as i32);
        first as usize..end.max(first) as usize
    }
}

/// First key position in the band of query `i`; negative where the band starts before key 0.
#[cfg_attr(feature = "cube", cube)]
pub fn first_key(i: i32, offset: i32, left: i32) -> i32 {
    i + offset - left
}

/// One past the last key position in the band of query `i`; may lie past the last key.
#[cfg_attr(feature = "cube", cube)]
pub fn end_key(i: i32, offset: i32, right: i32) -> i32 {
    i + offset + right + 1
}

/// First query position that sees key `j`; may be negative.
#[cfg_attr(feature = "cube", cube)]
pub fn first_query(j: i32, offset: i32, right: i32) -> i32 {
    j - offset - right
}

/// One past the last query position that sees key `j`; may lie past the last query.
#[cfg_attr(feature = "cube", cube)]
pub fn end_query(j: i32, offset: i32, left: i32) -> i32 {
    j - offset + left + 1
}

/// Whether the band lets query `i` see key `j`.
#[cfg_attr(feature = "cube", cube)]
pub fn in_band(i: i32, j: i32, offset: i32, left: i32, right: i32) -> bool {
    j >= first_key(i, offset, left) && j < end_key(i, offset, right)
}
