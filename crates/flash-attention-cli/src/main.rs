//! `attn`: the command line of exact attention.
//!
//! Each subcommand is a thin layer over a library and returns a [`Report`]; printing, `--json` and
//! the exit status are decided here, once.

mod bench;
mod check;
mod devices;
mod failure;
mod ledger;
mod report;
mod run;

use clap::{Parser, Subcommand};
use failure::{guard, keep_panics};
use report::{Report, one_line};
use std::error::Error;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// What a subcommand returns: any error is printed as one line.
type Outcome<T> = Result<T, Box<dyn Error>>;

/// Exact blockwise (flash) attention, forward and backward.
///
/// Lists the devices that can compute it, holds them to an f64 reference, runs it on a file of
/// tensors, measures it, and shows the block recurrence step by step. The exit status is 0 only when all is
/// well; 2 where the command line is wrong, with a hint on standard error; else 1, with one line there.
#[derive(Parser)]
#[command(name = "attn", version, arg_required_else_help = false)]
struct Cli {
    /// Print JSON instead of text; infinities and NaN are strings there
    #[arg(long, global = true, display_order = 900)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Devices(devices::DevicesArgs),
    Check(check::CheckArgs),
    Run(run::RunArgs),
    Bench(bench::BenchArgs),
    Ledger(ledger::LedgerArgs),
}

fn main() -> ExitCode {
    keep_panics();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Help, or what is wrong with the command line and a hint. A reader that closes the pipe
            // early has seen enough.
            let _ = usage.print();
            return match usage.use_stderr() {
                true => ExitCode::from(2),
                false => ExitCode::SUCCESS,
            };
        }
    };
    let outcome = guard(|| match cli.command {
        Command::Devices(args) => devices::execute(args),
        Command::Check(args) => check::execute(args),
        Command::Run(args) => run::execute(args),
        Command::Bench(args) => bench::execute(args),
        Command::Ledger(args) => ledger::execute(args),
    });
    let failure = match outcome.and_then(|report| print(report, cli.json)) {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(failure)) => failure,
        Err(error) => error.to_string(),
    };
    eprintln!("error: {}", one_line(&failure));
    ExitCode::FAILURE
}

/// Prints a report and returns what failed in it, if anything.
fn print(report: Report, json: bool) -> Outcome<Option<String>> {
    let mut out = io::stdout().lock();
    let written = match json {
        true => writeln!(out, "{:#}", report.json),
        false => write!(out, "{}", report.text),
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(report.failure),
    }
}
