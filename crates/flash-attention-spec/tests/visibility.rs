//! The band against a reading of the rules pair by pair.

use flash_attention_spec::visibility::in_band;
use flash_attention_spec::{Alignment, Band, Options, Window};

const LONGEST: usize = 6;

/// The rules as they are stated, in signed integers, one pair at a time.
fn visible(i: usize, j: usize, seq_q: usize, seq_kv: usize, options: &Options) -> bool {
    let offset = match options.alignment {
        Alignment::BottomRight => seq_kv as i64 - seq_q as i64,
        Alignment::TopLeft => 0,
    };
    let at = i as i64 + offset;
    let j = j as i64;
    let causal = !options.causal || j <= at;
    let left = options.window.left.is_none_or(|n| at - n as i64 <= j);
    let right = options.window.right.is_none_or(|n| j <= at + n as i64);
    causal && left && right
}

/// Every small pair of lengths with every combination of options.
fn for_each(mut check: impl FnMut(usize, usize, &Options)) {
    let sides = || (0..=2 * LONGEST).map(Some).chain([None, Some(1 << 40)]);
    for seq_q in 0..=LONGEST {
        for seq_kv in 0..=LONGEST {
            for alignment in [Alignment::BottomRight, Alignment::TopLeft] {
                for causal in [false, true] {
                    for (left, right) in sides().flat_map(|l| sides().map(move |r| (l, r))) {
                        let options = Options {
                            causal,
                            alignment,
                            window: Window { left, right },
                            ..Options::default()
                        };
                        check(seq_q, seq_kv, &options);
                    }
                }
            }
        }
    }
}

#[test]
fn keys_of_a_query_are_those_the_rules_leave() {
    for_each(|seq_q, seq_kv, options| {
        let band = Band::new(seq_q, seq_kv, options);
        for i in 0..seq_q {
            let keys: Vec<usize> = band.keys(i, seq_kv).collect();
            let expected: Vec<usize> = (0..seq_kv)
                .filter(|&j| visible(i, j, seq_q, seq_kv, options))
                .collect();
            assert_eq!(
                keys, expected,
                "query {i} of {seq_q} x {seq_kv}, {options:?}"
            );
        }
    });
}

#[test]
fn queries_of_a_key_are_those_the_rules_leave() {
    for_each(|seq_q, seq_kv, options| {
        let band = Band::new(seq_q, seq_kv, options);
        for j in 0..seq_kv {
            let queries: Vec<usize> = band.queries(j, seq_q).collect();
            let expected: Vec<usize> = (0..seq_q)
                .filter(|&i| visible(i, j, seq_q, seq_kv, options))
                .collect();
            assert_eq!(
                queries, expected,
                "key {j} of {seq_q} x {seq_kv}, {options:?}"
            );
        }
    });
}

#[test]
fn a_pair_is_in_the_band_when_the_rules_leave_it() {
    for_each(|seq_q, seq_kv, options| {
        let band = Band::new(seq_q, seq_kv, options);
        for (i, j) in (0..seq_q).flat_map(|i| (0..seq_kv).map(move |j| (i, j))) {
            assert_eq!(
                in_band(i as i32, j as i32, band.offset, band.left, band.right),
                visible(i, j, seq_q, seq_kv, options),
                "query {i}, key {j} of {seq_q} x {seq_kv}, {options:?}"
            );
        }
    });
}

#[test]
fn keys_and_queries_are_each_others_transpose() {
    for_each(|seq_q, seq_kv, options| {
        let band = Band::new(seq_q, seq_kv, options);
        for (i, j) in (0..seq_q).flat_map(|i| (0..seq_kv).map(move |j| (i, j))) {
            assert_eq!(
                band.keys(i, seq_kv).contains(&j),
                band.queries(j, seq_q).contains(&i),
                "query {i}, key {j} of {seq_q} x {seq_kv}, {options:?}"
            );
        }
    });
}

#[test]
fn positions_of_the_longest_sequences_fit_their_integers() {
    use flash_attention_spec::problem::MAX_SEQUENCE;
    for alignment in [Alignment::BottomRight, Alignment::TopLeft] {
        for (seq_q, seq_kv) in [
            (1, MAX_SEQUENCE),
            (MAX_SEQUENCE, 1),
            (MAX_SEQUENCE, MAX_SEQUENCE),
        ] {
            let options = Options {
                alignment,
                ..Options::default()
            };
            let band = Band::new(seq_q, seq_kv, &options);
            // Arithmetic past 32 bits would panic here, as tests check for overflow.
            for i in [0, seq_q - 1] {
                assert_eq!(band.keys(i, seq_kv), 0..seq_kv);
            }
            for j in [0, seq_kv - 1] {
                assert_eq!(band.queries(j, seq_q), 0..seq_q);
            }
        }
    }
}

#[test]
fn a_window_of_nothing_on_either_side_is_the_diagonal() {
    let diagonal = Options {
        window: Window {
            left: Some(0),
            right: Some(0),
        },
        ..Options::default()
    };
    let band = Band::new(3, 5, &diagonal);
    assert_eq!([0, 1, 2].map(|i| band.keys(i, 5)), [2..3, 3..4, 4..5]);
}
