//! `attn`: the command line of exact attention.
//!
//! Each subcommand is a thin layer over a library and returns a [`Report`]; printing, `--json` and
//! the exit status are decided here, once.

mod bench;
mod check;
mod devices;
mod failure;
mod ledger;
mod precision;
mod report;
mod run;

use clap::error::ErrorKind as Misuse;
use clap::{CommandFactory, Parser, Subcommand};
use failure::{Usage, guard, keep_panics};
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

impl Command {
    /// What the command line calls it.
    fn name(&self) -> &'static str {
        match self {
            Self::Devices(_) => "devices",
            Self::Check(_) => "check",
            Self::Run(_) => "run",
            Self::Bench(_) => "bench",
            Self::Ledger(_) => "ledger",
        }
    }
}

fn main() -> ExitCode {
    keep_panics();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => return explain(&usage),
    };
    let name = cli.command.name();
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
        Err(error) => match error.downcast_ref() {
            Some(usage) => return explain(&misuse(name, usage)),
            None => error.to_string(),
        },
    };
    eprintln!("error: {}", one_line(&failure));
    ExitCode::FAILURE
}

/// Prints help, or what is wrong with the command line and a hint.
fn explain(usage: &clap::Error) -> ExitCode {
    // A reader that closes the pipe early has seen enough.
    let _ = usage.print();
    match usage.use_stderr() {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

/// What a subcommand has found wrong with its arguments, as the parser would say it.
fn misuse(subcommand: &str, usage: &Usage) -> clap::Error {
    let mut attn = Cli::command();
    // Subcommands learn their full name, which the hint shows.
    attn.build();
    match attn.find_subcommand_mut(subcommand) {
        Some(command) => command.error(Misuse::ValueValidation, usage),
        None => attn.error(Misuse::ValueValidation, usage),
    }
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
