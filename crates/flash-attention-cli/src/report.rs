//! What a subcommand hands back, and how numbers and tables are set.

use serde_json::{Number, Value};
use std::fmt;

/// The result of a subcommand: the same content as text and as JSON.
pub struct Report {
    /// For a terminal.
    pub text: String,
    /// For `--json`.
    pub json: Value,
    /// Why the exit status is not 0 although there is something to print.
    pub failure: Option<String>,
}

/// Columns of text, each as wide as its widest cell.
pub struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with the given column titles. A title that starts with `<` sets its column flush
    /// left and loses the sign; all others are flush right.
    pub fn new<const N: usize>(header: [&'static str; N]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with one cell per column.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.header.len(), "a cell for every column");
        self.rows.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = self
            .header
            .iter()
            .map(|title| title.trim_start_matches('<'));
        let titles: Vec<String> = titles.map(String::from).collect();
        let lines = || std::iter::once(&titles).chain(&self.rows);
        let width = |column: usize| lines().map(|line| line[column].chars().count()).max();
        let widths: Vec<usize> = (0..titles.len()).filter_map(width).collect();
        for line in lines() {
            let mut text = String::new();
            for ((cell, title), &width) in line.iter().zip(&self.header).zip(&widths) {
                text += &match title.starts_with('<') {
                    true => format!("  {cell:<width$}"),
                    false => format!("  {cell:>width$}"),
                };
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// A number for a table: seven digits are enough to follow a computation by eye.
pub fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0".to_string(),
        size if (1e-4..1e7).contains(&size) => format!("{x:.6}"),
        size if size.is_finite() => format!("{x:.4e}"),
        _ => x.to_string(),
    }
}

/// A number for JSON, which has no infinities: those become the strings `"inf"`, `"-inf"`, `"NaN"`.
pub fn json_number(x: f64) -> Value {
    Number::from_f64(x).map_or_else(|| x.to_string().into(), Value::Number)
}

/// [`json_number`] of each.
pub fn json_numbers(numbers: &[f64]) -> Value {
    numbers.iter().map(|&x| json_number(x)).collect()
}

/// Text without line breaks, for an error that has to be one line.
pub fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}
