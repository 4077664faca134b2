//! `attn ledger`: the block recurrence, step by step.

use crate::Outcome;
use crate::failure::{Usage, parse_count};
use crate::report::{Report, Table, json_number, json_numbers, number};
use clap::{ArgAction, Args};
use flash_attention_spec::ledger::{
    self, BackwardBlock, BackwardLedger, ForwardLedger, GradientRows, WORKED_ROWS, WORKED_SCORES,
};
use serde_json::{Value, json};
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::ops::Range;

/// How far a block result may lie from the full row, relative to the numbers in it: both are
/// `f64`, so that only the order of summation separates them.
const TOLERANCE: f64 = 1e-12;

/// Show what the method does, block by block, in f64
///
/// Forward, it walks one row of scores in blocks and keeps a running maximum m, a running
/// denominator l and an accumulated output a in place of the row of probabilities:
///
///   m' = max(m, block max)    alpha = exp(m - m')
///
///   l' = alpha l + sum exp(s - m')    a' = alpha a + sum exp(s - m') v
///
/// At the end o = a / l and lse = m + ln l, the same as a softmax over the whole row.
///
/// With --backward it takes five positions of two channels, rebuilds each block of probabilities
/// as P = exp(s - lse) from the one number saved per query, and adds up the gradients; the gradients
/// by the full table stand beside them. The exit status is 1 if the two ways disagree.
#[derive(Args)]
pub struct LedgerArgs {
    /// Scores of one row, separated by commas; -inf hides a key [default: 1,2,-1,3,0,2.5]
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        conflicts_with = "backward"
    )]
    scores: Option<Vec<f64>>,
    /// One value per score [default: 1,2,3,.. so that the output is the mean position]
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        conflicts_with = "backward"
    )]
    values: Option<Vec<f64>>,
    /// Scores in a block
    #[arg(
        long,
        value_name = "N",
        default_value = "2",
        value_parser = parse_count,
        conflicts_with = "backward"
    )]
    block: NonZeroUsize,
    /// Show the backward pass of a worked example instead, which takes no --scores, --values, --block
    #[arg(long)]
    backward: bool,
    /// With --backward: queries in a block
    #[arg(
        long,
        value_name = "N",
        default_value = "2",
        value_parser = parse_count,
        requires = "backward"
    )]
    block_q: NonZeroUsize,
    /// With --backward: keys in a block
    #[arg(
        long,
        value_name = "N",
        default_value = "2",
        value_parser = parse_count,
        requires = "backward"
    )]
    block_kv: NonZeroUsize,
    /// With --backward: whether a query sees only the keys up to its own position; --causal=false
    /// shows all keys
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = true,
        default_missing_value = "true",
        action = ArgAction::Set,
        requires = "backward"
    )]
    causal: bool,
}

pub fn execute(args: LedgerArgs) -> Outcome<Report> {
    if args.backward {
        let (block_q, block_kv) = (args.block_q.get(), args.block_kv.get());
        let ledger =
            ledger::backward(&WORKED_ROWS, args.causal, block_q, block_kv).map_err(Usage::new)?;
        return Ok(Report {
            text: backward_text(&ledger, &args)?,
            json: backward_json(&ledger, &args),
            failure: disagreement("the gradients", ledger.difference, 1.0),
        });
    }
    let scores = args.scores.unwrap_or(WORKED_SCORES.to_vec());
    let positions = || (1..=scores.len()).map(|n| n as f64).collect();
    let values: Vec<f64> = args.values.unwrap_or_else(positions);
    let rows: Vec<[f64; 1]> = values.iter().map(|&v| [v]).collect();
    let block = args.block.get();
    let ledger = ledger::forward(&scores, &rows, block).map_err(Usage::new)?;
    let largest_value = values.iter().fold(1.0, |size: f64, v| size.max(v.abs()));
    Ok(Report {
        text: forward_text(&ledger, &values, block)?,
        json: forward_json(&ledger, &values, block),
        failure: disagreement("the output", ledger.output_difference, largest_value)
            .or_else(|| disagreement("lse", ledger.lse_difference, ledger.lse.abs().max(1.0))),
    })
}

/// `NaN` counts as a disagreement; an infinite size, of an lse of `-inf`, allows none.
fn disagreement(what: &str, difference: f64, size: f64) -> Option<String> {
    let agrees = difference == 0.0 || (size.is_finite() && difference <= TOLERANCE * size);
    (!agrees).then(|| format!("{what} by blocks and by the full row differ by {difference:e}"))
}

fn forward_text(ledger: &ForwardLedger<1>, values: &[f64], block: usize) -> Outcome<String> {
    let mut keys = Table::new(["block", "key", "score s", "value v", "exp(s - m)"]);
    let mut blocks = Table::new([
        "block",
        "keys",
        "block max",
        "running max m",
        "alpha",
        "denominator l",
        "accumulated a",
    ]);
    for (n, b) in ledger.blocks.iter().enumerate() {
        for (at, key) in b.keys.clone().enumerate() {
            keys.row([
                (n + 1).to_string(),
                key.to_string(),
                number(b.scores[at]),
                number(values[key]),
                number(b.probabilities[at]),
            ]);
        }
        blocks.row([
            (n + 1).to_string(),
            span(&b.keys),
            number(b.block_max),
            number(b.running_max),
            number(b.rescale),
            number(b.denominator),
            number(b.accumulator[0]),
        ]);
    }
    let mut end = Table::new(["", "by blocks", "full row", "difference"]);
    end.row([
        "o = a / l".to_string(),
        number(ledger.output[0]),
        number(ledger.full_output[0]),
        format!("{:.1e}", ledger.output_difference),
    ]);
    end.row([
        "lse = m + ln l".to_string(),
        number(ledger.lse),
        number(ledger.full_lse),
        format!("{:.1e}", ledger.lse_difference),
    ]);

    let mut text = String::new();
    writeln!(
        text,
        "One row of {} scores in blocks of {block}\n",
        values.len()
    )?;
    writeln!(text, "{keys}\n{blocks}\n{end}")?;
    Ok(text.trim_end().to_string() + "\n")
}

fn forward_json(ledger: &ForwardLedger<1>, values: &[f64], block: usize) -> Value {
    let blocks: Vec<Value> = ledger
        .blocks
        .iter()
        .map(|b| {
            json!({
                "keys": [b.keys.start, b.keys.end],
                "scores": json_numbers(&b.scores),
                "block_max": json_number(b.block_max),
                "running_max": json_number(b.running_max),
                "rescale": json_number(b.rescale),
                "probabilities": json_numbers(&b.probabilities),
                "denominator": json_number(b.denominator),
                "accumulated": json_number(b.accumulator[0]),
            })
        })
        .collect();
    json!({
        "block": block,
        "values": json_numbers(values),
        "blocks": blocks,
        "o": json_number(ledger.output[0]),
        "lse": json_number(ledger.lse),
        "full": {
            "o": json_number(ledger.full_output[0]),
            "lse": json_number(ledger.full_lse),
        },
        "difference": {
            "o": json_number(ledger.output_difference),
            "lse": json_number(ledger.lse_difference),
        },
    })
}

fn backward_text(ledger: &BackwardLedger<2>, args: &LedgerArgs) -> Outcome<String> {
    let mut text = String::new();
    writeln!(
        text,
        "Five positions of two channels, {}, in blocks of {} queries x {} keys\n",
        if args.causal {
            "causal"
        } else {
            "all keys visible"
        },
        args.block_q,
        args.block_kv,
    )?;
    let mut saved = Table::new(["query", "saved lse", "o[0]", "o[1]"]);
    for (i, (lse, o)) in ledger.lse.iter().zip(&ledger.output).enumerate() {
        saved.row([i.to_string(), number(*lse), number(o[0]), number(o[1])]);
    }
    writeln!(text, "Forward pass\n{saved}")?;
    for (n, block) in ledger.blocks.iter().enumerate() {
        let (queries, keys) = (span(&block.queries), span(&block.keys));
        let total = ledger.blocks.len();
        writeln!(
            text,
            "Block {} of {total}: queries {queries}, keys {keys}",
            n + 1
        )?;
        writeln!(text, "{}", rebuilt(block))?;
        writeln!(text, "{}", so_far(block, &ledger.full))?;
    }
    writeln!(
        text,
        "Largest difference to the full gradients: {:.1e}\n",
        ledger.difference
    )?;

    let counts = &ledger.counts;
    let mut table = Table::new(["<counted apart", ""]);
    for (what, count) in [
        ("probabilities in a full table", counts.full_probabilities),
        ("statistics saved", counts.saved_statistics),
        ("largest block", counts.largest_block),
        ("dot products forward", counts.forward_dot_products),
        ("dot products again backward", counts.backward_dot_products),
        ("blocks visited", counts.visited_blocks),
        ("blocks skipped", counts.skipped_blocks),
    ] {
        table.row([what.to_string(), count.to_string()]);
    }
    write!(text, "{table}")?;
    Ok(text)
}

/// The rebuilt rows of a block, one line per query and key.
fn rebuilt(block: &BackwardBlock<2>) -> Table {
    let mut table = Table::new(["query", "key", "D", "P = exp(s - lse)", "dS = P (dP - D)"]);
    for (row, i) in block.queries.clone().enumerate() {
        for (column, j) in block.keys.clone().enumerate() {
            table.row([
                i.to_string(),
                j.to_string(),
                number(block.delta[row]),
                number(block.probabilities[row][column]),
                number(block.score_gradients[row][column]),
            ]);
        }
    }
    table
}

/// The gradient rows a block adds to, beside the full ones.
fn so_far(block: &BackwardBlock<2>, full: &GradientRows<2>) -> Table {
    let mut table = Table::new(["", "so far [0]", "full [0]", "so far [1]", "full [1]"]);
    let gradients = [
        ("dq", &block.queries, &block.gradients.query, &full.query),
        ("dk", &block.keys, &block.gradients.key, &full.key),
        ("dv", &block.keys, &block.gradients.value, &full.value),
    ];
    for (name, rows, now, full) in gradients {
        for n in rows.clone() {
            let [now, full] = [now[n], full[n]];
            let [a, b, c, d] = [now[0], full[0], now[1], full[1]].map(number);
            table.row([format!("{name} {n}"), a, b, c, d]);
        }
    }
    table
}

fn backward_json(ledger: &BackwardLedger<2>, args: &LedgerArgs) -> Value {
    let blocks: Vec<Value> = ledger
        .blocks
        .iter()
        .map(|b| {
            json!({
                "queries": [b.queries.start, b.queries.end],
                "keys": [b.keys.start, b.keys.end],
                "probabilities": json_rows(&b.probabilities),
                "d": json_numbers(&b.delta),
                "score_gradients": json_rows(&b.score_gradients),
                "gradients_so_far": json_gradients(&b.gradients),
            })
        })
        .collect();
    let counts = &ledger.counts;
    json!({
        "causal": args.causal,
        "block_q": args.block_q,
        "block_kv": args.block_kv,
        "o": json_rows(&ledger.output),
        "lse": json_numbers(&ledger.lse),
        "blocks": blocks,
        "full_gradients": json_gradients(&ledger.full),
        "difference": json_number(ledger.difference),
        "counts": {
            "full_probabilities": counts.full_probabilities,
            "saved_statistics": counts.saved_statistics,
            "largest_block": counts.largest_block,
            "forward_dot_products": counts.forward_dot_products,
            "backward_dot_products": counts.backward_dot_products,
            "visited_blocks": counts.visited_blocks,
            "skipped_blocks": counts.skipped_blocks,
        },
    })
}

fn json_gradients(gradients: &GradientRows<2>) -> Value {
    json!({
        "dq": json_rows(&gradients.query),
        "dk": json_rows(&gradients.key),
        "dv": json_rows(&gradients.value),
    })
}

fn json_rows(rows: &[impl AsRef<[f64]>]) -> Value {
    rows.iter().map(|row| json_numbers(row.as_ref())).collect()
}

fn span(positions: &Range<usize>) -> String {
    format!("{}..{}", positions.start, positions.end)
}
