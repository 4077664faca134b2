//! A drawing of TFLOP/s over the sequence length, as SVG.
//!
//! One panel for each pass, variant and head dimension, one line for each kernel. The x axis is
//! logarithmic, and the y axis starts at 0 and is the same in every panel.

use super::peers::Peers;
use super::record::Measured;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Size of a panel, and what of it is left free around the axes for labels.
const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 48.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 14.0;
const BOTTOM: f64 = 40.0;

/// Height of the title, and of each line of the legend below it.
const TITLE: f64 = 40.0;
const LEGEND: f64 = 20.0;

/// Width of a kernel's place in the legend.
const ENTRY: f64 = 160.0;

/// Panels beside each other at most.
const COLUMNS: usize = 3;

/// Okabe and Ito's colours, which remain apart for colour-blind readers.
const COLOURS: [&str; 7] = [
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
];

/// Sequence length and TFLOP/s of each kernel.
type Lines = BTreeMap<String, Vec<(usize, f64)>>;

/// The drawing.
pub fn svg(title: &str, found: &[Measured], peers: &Peers) -> String {
    let panels = panels(found, peers);
    let mut kernels: Vec<&str> = Vec::new();
    for kernel in panels.iter().flat_map(|(_, lines)| lines.keys()) {
        if !kernels.contains(&kernel.as_str()) {
            kernels.push(kernel);
        }
    }
    let all = || {
        panels
            .iter()
            .flat_map(|(_, lines)| lines.values().flatten())
    };
    let highest = all().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let columns = panels.len().clamp(1, COLUMNS);
    let width = WIDTH * columns as f64;
    let beside = ((width - LEFT) / ENTRY) as usize;
    let heading = TITLE + LEGEND * kernels.len().div_ceil(beside) as f64;
    let height = heading + HEIGHT * panels.len().div_ceil(columns) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(
        &mut out,
        [LEFT, 22.0],
        "text-anchor=\"start\" font-size=\"14\"",
        title,
    );
    legend(&mut out, &kernels, beside);
    for (n, (title, lines)) in panels.iter().enumerate() {
        let at = [
            WIDTH * (n % columns) as f64,
            heading + HEIGHT * (n / columns) as f64,
        ];
        panel(&mut out, at, title, lines, &kernels, step(highest));
    }
    out + "</svg>\n"
}

/// The lines of each panel, in the order in which they were measured.
fn panels(found: &[Measured], peers: &Peers) -> Vec<(String, Lines)> {
    let mut panels: Vec<(String, Lines)> = Vec::new();
    for measured in found {
        let point = &measured.point;
        let (variant, head_dim) = (point.variant, point.head_dim);
        let title = format!(
            "{}, {variant}, head dim {head_dim}, {}",
            point.pass, point.dtype
        );
        let at = panels.iter().position(|(known, _)| *known == title);
        let at = at.unwrap_or_else(|| {
            panels.push((title, Lines::new()));
            panels.len() - 1
        });
        let lines = &mut panels[at].1;
        let mut add = |kernel: String, rate| {
            lines.entry(kernel).or_default().push((point.seq, rate));
        };
        add(measured.kernel.clone(), measured.tflops());
        for peer in peers.ratios(measured) {
            add(peer.kernel, peer.tflops);
        }
    }
    for line in panels.iter_mut().flat_map(|(_, lines)| lines.values_mut()) {
        line.sort_by_key(|(seq, _)| *seq);
    }
    panels
}

/// `beside`: how many kernels have room in a line.
fn legend(out: &mut String, kernels: &[&str], beside: usize) {
    for (n, kernel) in kernels.iter().enumerate() {
        let x = LEFT + ENTRY * (n % beside) as f64;
        let y = TITLE + LEGEND * (n / beside) as f64;
        let (end, colour) = (x + 22.0, colour(n));
        let _ = writeln!(
            out,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{end}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2.5\"/>"
        );
        label(out, [x + 28.0, y + 4.0], START, kernel);
    }
}

fn panel(
    out: &mut String,
    [x, y]: [f64; 2],
    title: &str,
    lines: &Lines,
    kernels: &[&str],
    (step, steps): (f64, usize),
) {
    let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let mut seqs: Vec<usize> = lines.values().flatten().map(|(seq, _)| *seq).collect();
    seqs.sort_unstable();
    seqs.dedup();
    let log = |seq: usize| (seq as f64).log2();
    let (first, last) = (log(seqs[0]), log(seqs[seqs.len() - 1]));
    let x_of = |seq: usize| match last > first {
        true => x + LEFT + wide * (log(seq) - first) / (last - first),
        false => x + LEFT + wide / 2.0,
    };
    let y_of = |rate: f64| y + TOP + high * (1.0 - rate / (step * steps as f64));

    label(
        out,
        [x + LEFT, y + TOP - 10.0],
        "text-anchor=\"start\" font-weight=\"bold\"",
        title,
    );
    for n in 0..=steps {
        let rate = step * n as f64;
        let (left, right, at) = (x + LEFT, x + LEFT + wide, y_of(rate));
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
        );
        label(out, [left - 6.0, at + 4.0], END, &short(rate));
    }
    for &seq in &seqs {
        label(
            out,
            [x_of(seq), y + TOP + high + 16.0],
            MIDDLE,
            &length(seq),
        );
    }
    let middle = [x + LEFT + wide / 2.0, y + HEIGHT - 8.0];
    label(out, middle, MIDDLE, "sequence length; y: TFLOP/s");
    for (n, kernel) in kernels.iter().enumerate() {
        let Some(line) = lines.get(*kernel) else {
            continue;
        };
        let colour = colour(n);
        let places = line.iter().map(|&(seq, rate)| [x_of(seq), y_of(rate)]);
        let places: Vec<[f64; 2]> = places.collect();
        let path: Vec<String> = places
            .iter()
            .map(|[x, y]| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for [x, y] in places {
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
            );
        }
    }
}

/// Where a label lies from its place.
const START: &str = "text-anchor=\"start\"";
const MIDDLE: &str = "text-anchor=\"middle\"";
const END: &str = "text-anchor=\"end\"";

fn label(out: &mut String, [x, y]: [f64; 2], attributes: &str, text: &str) {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{text}</text>"
    );
}

fn colour(n: usize) -> &'static str {
    COLOURS[n % COLOURS.len()]
}

/// A round step, and how many of them hold `highest`: four to ten.
fn step(highest: f64) -> (f64, usize) {
    if !(highest > 0.0 && highest.is_finite()) {
        return (1.0, 1);
    }
    let decade = 10f64.powf((highest / 5.0).log10().floor());
    let step = decade
        * match highest / 5.0 / decade {
            5.0.. => 5.0,
            2.0.. => 2.0,
            _ => 1.0,
        };
    (step, (highest / step).ceil().max(1.0) as usize)
}

fn short(rate: f64) -> String {
    let digits = match rate {
        0.0 => 0,
        10.0.. => 0,
        _ => (1.0 - rate.log10().floor()) as usize,
    };
    let text = format!("{rate:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

fn length(seq: usize) -> String {
    match seq {
        _ if seq.is_multiple_of(1 << 20) => format!("{}M", seq >> 20),
        _ if seq.is_multiple_of(1 << 10) => format!("{}k", seq >> 10),
        _ => seq.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::measured;

    #[test]
    fn every_kernel_has_a_line_and_every_length_a_place() {
        let (mut first, mut second, mut third) =
            (measured(&[1e-3]), measured(&[1e-3]), measured(&[1e-3]));
        second.point.seq = 2_048;
        third.point.head_dim = 128;
        first.kernel = "a <b>".to_string();
        second.kernel = "a <b>".to_string();
        let svg = svg("title", &[first, second, third], &Peers::default());
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        let count = |what: &str| svg.matches(what).count();
        assert_eq!((count("<polyline"), count("<circle")), (2, 3));
        assert_eq!(count("head dim"), 2);
        assert!(svg.contains(">2k</text>") && svg.contains(">a &lt;b&gt;</text>"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn steps_are_round_and_reach_the_highest() {
        for (highest, expected) in [(600.0, (100.0, 6)), (1.0, (0.2, 5)), (0.037, (0.005, 8))] {
            let (step, steps) = step(highest);
            assert!((step - expected.0).abs() < 1e-12, "{highest}: {step}");
            assert_eq!(steps, expected.1, "{highest}");
        }
        assert_eq!(step(0.0), (1.0, 1));
        assert_eq!(
            [short(0.0), short(100.0), short(0.02)],
            ["0", "100", "0.02"]
        );
        assert_eq!(
            [length(64), length(4_096), length(1 << 20)],
            ["64", "4k", "1M"]
        );
    }
}
