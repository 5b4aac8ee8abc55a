//! Attention from the command line; the library does the work.

mod attend;
mod bench;
mod compare;
mod demo;
mod device;
mod engine;
mod heatmap;
mod info;
mod shaders;
mod tensor;
mod terminal;
mod weights;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Attention on any GPU, and on software adapters where there is none.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Attend(Box<attend::AttendArgs>),
    Bench(bench::BenchArgs),
    Info(info::InfoArgs),
    Shaders(shaders::ShadersArgs),
}

/// What every command understands.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// The adapter: any part of its line in `info`, whatever the case; `oracle` computes on the CPU in f64.
    /// Default: the best
    #[arg(long, global = true, value_name = "SUBSTR")]
    pub adapter: Option<String>,
    /// Use only these kernels: a name from `info`, or a part of names between dots, like `portable`
    #[arg(long, global = true, value_name = "NAME")]
    pub variant: Option<String>,
}

fn main() -> ExitCode {
    quiet_drivers();
    let cli = Cli::parse();
    let level = env_logger::Env::default().default_filter_or("error,wgpu_attention=warn");
    env_logger::Builder::from_env(level).format_timestamp(None).init();
    let result = match cli.command {
        Command::Demo(args) => demo::run(&args, &cli.global),
        Command::Attend(args) => attend::run(&args, &cli.global),
        Command::Bench(args) => bench::run(&args, &cli.global),
        Command::Info(args) => info::run(&args, &cli.global),
        Command::Shaders(args) => shaders::run(&args, &cli.global),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("error: {error:#}").replace('\n', " ");
            // Nobody is left to tell if this fails.
            let _ = writeln!(std::io::stderr(), "{message}");
            ExitCode::FAILURE
        }
    }
}

/// Vulkan drivers look for a window system, and complain on stderr where this variable is missing, as on servers.
#[cfg(target_os = "linux")]
fn quiet_drivers() {
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("XDG_RUNTIME_DIR", std::env::temp_dir()) };
    }
}

#[cfg(not(target_os = "linux"))]
fn quiet_drivers() {}
