//! What was found at a point, as a row of a table, of CSV and as JSON.

use super::grid::Point;
use super::peers::Ratio;
use super::timing::Timing;
use super::verify::Verdict;
use crate::report::json_number;
use burn_flash_attention::DeviceReport;
use serde_json::{Value, json};

/// Columns of CSV that say what a point is; those that say how it fared follow in [`RESULT`].
pub const POINT: [&str; 10] = [
    "grid", "variant", "pass", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "causal",
];

/// Columns of CSV that say how a point fared, of this program and of `scripts/bench_nvidia.py`.
pub const RESULT: [&str; 17] = [
    "kernel",
    "clock",
    "samples",
    "calls",
    "sets",
    "median_ms",
    "min_ms",
    "max_ms",
    "p10_ms",
    "p90_ms",
    "tflops",
    "peak_share",
    "memory_bytes",
    "relative_error",
    "declined",
    "device",
    "hardware",
];

/// Titles of the table in [`Measured::cells`].
pub const TITLES: [&str; 13] = [
    "<pass", "<variant", "head dim", "seq", "batch", "heads", "median", "min", "max", "TFLOP/s",
    "of peak", "memory", "<kernel",
];

/// Samples that a first and a last decile are taken of at least: of fewer they would be little else
/// than the least and the greatest.
const DECILES: usize = 20;

/// A measured point.
#[derive(Clone, Debug)]
pub struct Measured {
    pub point: Point,
    /// The family that served it.
    pub kernel: String,
    /// The families with their blocks, and why faster ones declined.
    pub explanation: String,
    pub timing: Timing,
    /// Sets of inputs that calls took in turn.
    pub sets: usize,
    /// The most that one call and its inputs take, in bytes.
    pub memory: Option<u64>,
    pub verdicts: Vec<Verdict>,
    /// TFLOP/s of the device at most.
    pub peak: Option<f64>,
}

impl Measured {
    /// Seconds a call: the `share` quantile of the samples, between two of them if need be.
    fn quantile(&self, share: f64) -> f64 {
        let mut seconds = self.timing.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let at = share * (seconds.len() - 1) as f64;
        let (low, high) = (at.floor() as usize, at.ceil() as usize);
        seconds[low] + (seconds[high] - seconds[low]) * at.fract()
    }

    /// Seconds a call.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Of the median.
    pub fn tflops(&self) -> f64 {
        self.point.operations() / self.median() / 1e12
    }

    fn peak_share(&self) -> Option<f64> {
        self.peak.map(|peak| self.tflops() / peak)
    }

    /// Median, least and greatest, in milliseconds.
    fn milliseconds(&self) -> [f64; 3] {
        [0.5, 0.0, 1.0].map(|share| self.quantile(share) * 1e3)
    }

    /// First and last decile in milliseconds, of enough samples.
    fn deciles(&self) -> [Option<f64>; 2] {
        let enough = self.timing.seconds.len() >= DECILES;
        [0.1, 0.9].map(|share| enough.then(|| self.quantile(share) * 1e3))
    }

    /// The verdict that came closest to its bound.
    fn worst(&self) -> Option<&Verdict> {
        let share = |verdict: &&Verdict| verdict.error / verdict.bound;
        let verdicts = self.verdicts.iter();
        verdicts.max_by(|a, b| share(a).total_cmp(&share(b)))
    }

    /// A row of the table with the columns [`TITLES`].
    pub fn cells(&self) -> [String; 13] {
        let point = &self.point;
        let [median, least, greatest] = self.milliseconds().map(milliseconds);
        let heads = match point.heads == point.kv_heads {
            true => point.heads.to_string(),
            false => format!("{}/{}", point.heads, point.kv_heads),
        };
        [
            point.pass.to_string(),
            point.variant.to_string(),
            point.head_dim.to_string(),
            point.seq.to_string(),
            point.batch.to_string(),
            heads,
            median,
            least,
            greatest,
            rate(self.tflops()),
            or_dash(
                self.peak_share()
                    .map(|share| format!("{:.1} %", 100.0 * share)),
            ),
            or_dash(self.memory.map(mebibytes)),
            self.kernel.clone(),
        ]
    }

    /// A row of CSV with the columns [`POINT`] and [`RESULT`].
    pub fn csv(&self, device: &DeviceReport) -> Vec<String> {
        let figure = |ms: f64| format!("{ms:.6}");
        let [median, least, greatest] = self.milliseconds().map(figure);
        let [p10, p90] = self.deciles().map(|ms| ms.map(figure).unwrap_or_default());
        let mut row = point_csv(&self.point);
        row.extend([
            self.kernel.clone(),
            self.timing.clock.to_string(),
            self.timing.seconds.len().to_string(),
            self.timing.calls.to_string(),
            self.sets.to_string(),
            median,
            least,
            greatest,
            p10,
            p90,
            format!("{:.6}", self.tflops()),
            self.peak_share()
                .map(|share| format!("{share:.4}"))
                .unwrap_or_default(),
            self.memory
                .map(|bytes| bytes.to_string())
                .unwrap_or_default(),
            self.worst()
                .map(|worst| format!("{:.3e}", worst.error))
                .unwrap_or_default(),
            String::new(),
            device.name.clone(),
            device.hardware.clone(),
        ]);
        row
    }

    /// The same and more, for `--json`.
    pub fn json(&self, ratios: &[Ratio]) -> Value {
        let [median, least, greatest] = self.milliseconds().map(json_number);
        let [p10, p90] = self.deciles().map(|ms| ms.map(json_number));
        let mut document = point_json(&self.point);
        let verdicts = self.verdicts.iter().map(|verdict| {
            json!({
                "output": verdict.output,
                "error": json_number(verdict.error),
                "bound": json_number(verdict.bound),
            })
        });
        document["kernel"] = self.kernel.clone().into();
        document["served_by"] = self.explanation.clone().into();
        document["clock"] = self.timing.clock.to_string().into();
        document["samples"] = self.timing.seconds.len().into();
        document["calls"] = self.timing.calls.into();
        document["sets"] = self.sets.into();
        document["median_ms"] = median;
        document["min_ms"] = least;
        document["max_ms"] = greatest;
        document["p10_ms"] = p10.into();
        document["p90_ms"] = p90.into();
        document["operations"] = json_number(self.point.operations());
        document["tflops"] = json_number(self.tflops());
        document["peak_share"] = self.peak_share().map(json_number).into();
        document["memory_bytes"] = self.memory.into();
        document["verified"] = verdicts.collect();
        if !ratios.is_empty() {
            document["peers"] = ratios.iter().map(Ratio::json).collect();
        }
        document
    }
}

/// A row of CSV with the columns [`POINT`].
pub fn point_csv(point: &Point) -> Vec<String> {
    vec![
        point.grid.to_string(),
        point.variant.to_string(),
        point.pass.to_string(),
        point.dtype.to_string(),
        point.batch.to_string(),
        point.heads.to_string(),
        point.kv_heads.to_string(),
        point.seq.to_string(),
        point.head_dim.to_string(),
        point.variant.causal().to_string(),
    ]
}

/// What a point is, for `--json`.
pub fn point_json(point: &Point) -> Value {
    json!({
        "grid": point.grid.to_string(),
        "variant": point.variant.to_string(),
        "pass": point.pass.to_string(),
        "dtype": point.dtype.to_string(),
        "batch": point.batch,
        "heads": point.heads,
        "kv_heads": point.kv_heads,
        "seq": point.seq,
        "head_dim": point.head_dim,
        "causal": point.variant.causal(),
    })
}

/// One line of CSV (RFC 4180), with its end.
pub fn csv_line<T: AsRef<str>>(cells: &[T]) -> String {
    let quoted = cells.iter().map(|cell| {
        let cell = cell.as_ref();
        match cell.contains([',', '"', '\n']) {
            true => format!("\"{}\"", cell.replace('"', "\"\"")),
            false => cell.to_string(),
        }
    });
    quoted.collect::<Vec<_>>().join(",") + "\n"
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_string())
}

/// Four digits are more than the noise leaves.
fn milliseconds(ms: f64) -> String {
    match ms {
        100.0.. => format!("{ms:.1}"),
        1.0.. => format!("{ms:.3}"),
        _ => format!("{ms:.4}"),
    }
}

/// TFLOP/s for a table.
pub fn rate(tflops: f64) -> String {
    match tflops {
        10.0.. => format!("{tflops:.1}"),
        0.1.. => format!("{tflops:.3}"),
        _ => format!("{tflops:.5}"),
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bench::grid::{Pass, Variant, tests::point};
    use crate::bench::timing::Clock;

    /// 2^22 operations in the given seconds.
    pub fn measured(seconds: &[f64]) -> Measured {
        Measured {
            point: point(Variant::Full, Pass::Forward),
            kernel: "composed".to_string(),
            explanation: "composed with blocks".to_string(),
            timing: Timing {
                seconds: seconds.to_vec(),
                calls: 3,
                clock: Clock::Host,
            },
            sets: 2,
            memory: Some(3 << 20),
            verdicts: Vec::new(),
            peak: Some(2.0),
        }
    }

    #[test]
    fn the_spread_lies_between_samples() {
        let found = measured(&[5.0, 1.0, 2.0, 4.0, 3.0]);
        assert_eq!(found.milliseconds(), [3_000.0, 1_000.0, 5_000.0]);
        assert_eq!(measured(&[2.0, 4.0]).median(), 3.0);
        assert_eq!(measured(&[2.0]).milliseconds(), [2_000.0; 3]);
    }

    /// Catches deciles that are the extremes by another name.
    #[test]
    fn deciles_come_of_enough_samples() {
        let seconds: Vec<f64> = (0..21).map(f64::from).collect();
        let found = measured(&seconds);
        assert_eq!(found.deciles(), [Some(2_000.0), Some(18_000.0)]);
        let few = measured(&seconds[..DECILES - 1]);
        assert_eq!(few.deciles(), [None; 2]);
        let json = few.json(&[]);
        assert!(json["p10_ms"].is_null() && json["max_ms"] == 18_000.0);
    }

    #[test]
    fn the_rate_is_of_the_median() {
        let found = measured(&[4.194304e-6; 3]);
        assert!((found.tflops() - 1.0).abs() < 1e-12);
        let cells = found.cells();
        assert_eq!(cells[6], "0.0042");
        assert_eq!(cells[9..12], ["1.000", "50.0 %", "3.0"]);
        let json = found.json(&[]);
        assert_eq!(
            (&json["clock"], &json["calls"]),
            (&"host".into(), &3.into())
        );
    }

    #[test]
    #[cfg(feature = "flex")]
    fn a_row_has_a_cell_for_every_column() {
        let mut device = burn_flash_attention::devices().remove(0);
        device.hardware = "one, \"two\"".to_string();
        let row = measured(&[1.0]).csv(&device);
        assert_eq!(row.len(), POINT.len() + RESULT.len());
        assert!(csv_line(&row).ends_with(",\"one, \"\"two\"\"\"\n"));
    }
}
