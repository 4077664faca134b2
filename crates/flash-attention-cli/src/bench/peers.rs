//! Figures of other implementations at the same points, from a CSV file.

use super::grid::Point;
use super::record::{Measured, POINT, point_csv, rate};
use crate::Outcome;
use crate::report::{Table, json_number};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Figures of other implementations.
#[derive(Debug, Default)]
pub struct Peers {
    figures: Vec<Peer>,
}

#[derive(Debug)]
struct Peer {
    /// The cells of [`POINT`], the name of the grid apart.
    point: Vec<String>,
    kernel: String,
    median_ms: f64,
}

/// How a point compares with one peer.
#[derive(Clone, Debug)]
pub struct Ratio {
    pub kernel: String,
    /// Of the peer, by the operations counted here.
    pub tflops: f64,
    /// The peer's time over ours: above 1 we are faster.
    pub ratio: f64,
}

impl Ratio {
    /// For `--json`.
    pub fn json(&self) -> Value {
        json!({
            "kernel": self.kernel,
            "tflops": json_number(self.tflops),
            "ratio": json_number(self.ratio),
        })
    }
}

impl Peers {
    /// Reads the columns that `attn bench --csv` and `scripts/bench_nvidia.py` write; others are
    /// passed over, and so are rows without a time.
    pub fn read(path: &Path) -> Outcome<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).map_err(|error| format!("peers {shown}: {error}"))?;
        Self::parse(&text).map_err(|error| format!("peers {shown}: {error}").into())
    }

    fn parse(text: &str) -> Outcome<Self> {
        let mut lines = text.lines().filter(|line| !line.is_empty());
        let header = cells(lines.next().unwrap_or_default());
        let column = |name: &str| -> Outcome<usize> {
            let at = header.iter().position(|title| title == name);
            Ok(at.ok_or_else(|| format!("has no column {name}"))?)
        };
        let point: Vec<usize> = POINT[1..]
            .iter()
            .map(|n| column(n))
            .collect::<Outcome<_>>()?;
        let (kernel, median) = (column("kernel")?, column("median_ms")?);
        let mut figures = Vec::new();
        for line in lines {
            let row = cells(line);
            if row.len() != header.len() {
                let (given, expected) = (row.len(), header.len());
                return Err(format!("a row has {given} cells, expected {expected}: {line}").into());
            }
            if row[median].is_empty() {
                continue;
            }
            let number: f64 = row[median].parse().unwrap_or(f64::NAN);
            if !(number > 0.0 && number.is_finite()) {
                return Err(format!("median_ms is {}, expected a time", row[median]).into());
            }
            figures.push(Peer {
                point: point.iter().map(|&at| row[at].clone()).collect(),
                kernel: row[kernel].clone(),
                median_ms: number,
            });
        }
        Ok(Self { figures })
    }

    /// Each peer that has a figure at the point of `found`.
    pub fn ratios(&self, found: &Measured) -> Vec<Ratio> {
        let here = self.at(&found.point);
        here.map(|peer| {
            let seconds = peer.median_ms / 1e3;
            Ratio {
                kernel: peer.kernel.clone(),
                tflops: found.point.operations() / seconds / 1e12,
                ratio: seconds / found.median(),
            }
        })
        .collect()
    }

    fn at(&self, point: &Point) -> impl Iterator<Item = &Peer> {
        let key = point_csv(point).split_off(1);
        self.figures.iter().filter(move |peer| peer.point == key)
    }
}

/// A table of the ratios at each point, and their geometric means by pass and peer.
pub fn text(found: &[Measured], peers: &Peers) -> String {
    let mut table = Table::new([
        "<pass",
        "<variant",
        "head dim",
        "seq",
        "ours",
        "best peer",
        "ratio",
        "<all ratios",
    ]);
    let mut logarithms: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for measured in found {
        let ratios = peers.ratios(measured);
        let Some(best) = ratios.iter().min_by(|a, b| a.ratio.total_cmp(&b.ratio)) else {
            continue;
        };
        let point = &measured.point;
        for ratio in &ratios {
            let key = (point.pass.to_string(), ratio.kernel.clone());
            logarithms.entry(key).or_default().push(ratio.ratio.ln());
        }
        let all = ratios
            .iter()
            .map(|it| format!("{} {:.2}", it.kernel, it.ratio));
        table.row([
            point.pass.to_string(),
            point.variant.to_string(),
            point.head_dim.to_string(),
            point.seq.to_string(),
            rate(measured.tflops()),
            rate(best.tflops),
            format!("{:.2}", best.ratio),
            all.collect::<Vec<_>>().join(", "),
        ]);
    }
    if logarithms.is_empty() {
        return "No peer has a figure at these points.\n".to_string();
    }
    let mut means = Table::new(["<pass", "<peer", "points", "ratio"]);
    for ((pass, kernel), logarithms) in logarithms {
        let mean = logarithms.iter().sum::<f64>() / logarithms.len() as f64;
        means.row([
            pass,
            kernel,
            logarithms.len().to_string(),
            format!("{:.2}", mean.exp()),
        ]);
    }
    format!(
        "Ratios are the peer's time over ours, above 1 we are faster; the best peer is the fastest.\n\n\
         {table}\nGeometric means:\n\n{means}"
    )
}

/// The cells of one line (RFC 4180, without line breaks in cells).
fn cells(line: &str) -> Vec<String> {
    let (mut cells, mut quoted) = (vec![String::new()], false);
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        let cell = cells.last_mut().expect("there is always one");
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                cell.push('"');
                characters.next();
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            _ => cell.push(character),
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::csv_line;
    use crate::bench::record::tests::measured;

    const FILE: &str = "grid,variant,pass,dtype,batch,heads,kv_heads,seq,head_dim,causal,kernel,\
        median_ms,hardware\n\
        other,full,forward,f32,1,16,16,64,16,false,torch-flash,2.0,\"a, b\"\n\
        masks,full,forward,f32,1,16,16,64,16,false,torch-cudnn,0.5,\n\
        masks,full,forward,f32,1,16,16,64,16,false,torch-flex,,out of memory\n\
        masks,full,backward,f32,1,16,16,64,16,false,torch-cudnn,9.0,\n";

    #[test]
    fn peers_are_found_by_the_point() {
        let peers = Peers::parse(FILE).unwrap();
        let found = measured(&[1e-3]);
        let ratios = peers.ratios(&found);
        let named: Vec<_> = ratios
            .iter()
            .map(|it| (it.kernel.as_str(), it.ratio))
            .collect();
        assert_eq!(named, [("torch-flash", 2.0), ("torch-cudnn", 0.5)]);
        let text = text(&[found], &peers);
        assert!(
            text.contains("0.50  torch-flash 2.00, torch-cudnn 0.50"),
            "{text}"
        );
        assert!(text.contains("torch-cudnn       1   0.50"), "{text}");
    }

    #[test]
    fn a_file_that_is_not_one_of_figures_is_refused() {
        let error = |text: &str| Peers::parse(text).unwrap_err().to_string();
        assert_eq!(error("a,b\n"), "has no column variant");
        assert!(error(&FILE.replace("2.0", "fast")).contains("median_ms is fast"));
        assert!(error(&FILE.replace("torch-flash,", "")).contains("a row has 12 cells"));
        assert!(Peers::parse(&FILE.replace("2.0", "")).is_ok());
    }

    #[test]
    fn cells_are_read_as_they_were_written() {
        let row = ["plain", "with, comma", "with \"quotes\"", ""];
        assert_eq!(cells(csv_line(&row).trim_end()), row);
    }
}
