//! `attend`: attention on tensors in files.

mod paged;

use std::fmt::Display;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use wgpu_attention::ops::attention::{MAX_LEN, alibi_slopes};
use wgpu_attention::{
    AttentionDesc, Batch, DType, HostInput, HostMask, Layout, Lengths, MaskKind, ScoreLayout, Start, Window,
};

use self::paged::Paged;
use crate::compare::{Comparison, compare, largest, tolerance};
use crate::engine::{Answer, Engine};
use crate::tensor::{self, Data, FileType, Output, Tensor};
use crate::weights::weights;
use crate::{Global, terminal};

/// Compute attention on tensors in files
///
/// F is `file.npy` or `file.safetensors:tensor`. Q, K and V are [batch, length, heads, dim]; a file with one tensor needs
/// no name. Types convert themselves: f64 is read as f32, and NumPy files hold bf16 as f32.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("result").args(["out", "lse", "expect", "expect_lse", "show", "page_len"]).required(true).multiple(true))]
pub struct AttendArgs {
    /// Queries
    #[arg(long, value_name = "F")]
    q: String,
    /// Keys, with as many heads as Q or a divisor of that
    #[arg(long, value_name = "F")]
    k: String,
    /// Values, with as many heads as K
    #[arg(long, value_name = "F")]
    v: String,

    /// Where the output goes, in the layout of Q and with the type of Q's file (f64 becomes f32)
    #[arg(long, value_name = "F", help_heading = "Results")]
    out: Option<String>,
    /// Where the log-sum-exp goes: f32 [batch, heads, length]; [heads, total] with --q-offsets
    #[arg(long, value_name = "F", help_heading = "Results")]
    lse: Option<String>,
    /// Compare the output with this, and fail if it is farther off than the tolerance
    #[arg(long, value_name = "F", help_heading = "Results")]
    expect: Option<String>,
    /// Compare the log-sum-exp with this
    #[arg(long, value_name = "F", help_heading = "Results")]
    expect_lse: Option<String>,
    /// Largest difference from the expected values. Default: 1e-4, or 4 units in the last place if the expected values
    /// or --dtype are of a 16-bit type, times the largest value of V (of the log-sum-exp)
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Results")]
    tolerance: Option<f64>,
    /// Draw the attention of this sequence and head
    #[arg(long, value_name = "B,H", value_parser = parse_pair, help_heading = "Results")]
    show: Option<(u32, u32)>,

    /// Order of the dimensions: batch, sequence, heads, dim
    #[arg(long, value_enum, default_value = "bshd", help_heading = "Layout")]
    layout: Order,
    /// Where sequences begin in Q [total, heads, dim]: 0, ascending, and total at the end
    #[arg(long, value_name = "F", help_heading = "Layout")]
    q_offsets: Option<String>,
    /// The same for K and V
    #[arg(long, value_name = "F", help_heading = "Layout")]
    kv_offsets: Option<String>,
    /// How many keys of each sequence count, where K and V are padded
    #[arg(long, value_name = "F", conflicts_with = "kv_offsets", help_heading = "Layout")]
    kv_lens: Option<String>,
    /// At which key row 0 stands: the last row at the last key, the first row at the first, or one number a sequence
    #[arg(long, value_name = "bottom-right|top-left|F", default_value = "bottom-right", help_heading = "Layout")]
    q_start: String,
    /// Compute it a second time with K and V in pages of P tokens at random places of a pool, NaN around them, and fail if
    /// the results differ by more than the tolerance
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LEN)), help_heading = "Layout")]
    page_len: Option<u32>,
    /// What the kernels see of Q, K and V, whatever the files hold. Default: the files' types, the wider of K and V.
    /// Arithmetic and the output are f32, rounded once when written
    #[arg(long, value_enum, help_heading = "Layout")]
    dtype: Option<Type>,

    /// A row sees no key after its position
    #[arg(long, help_heading = "Scores")]
    causal: bool,
    /// A row sees L keys before and R after its position, and the one there; `none` is unlimited
    #[arg(long, value_name = "L,R", value_parser = parse_window, allow_hyphen_values = true, help_heading = "Scores")]
    window: Option<Window>,
    /// Scores become X · tanh(score / X)
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Scores")]
    softcap: Option<f32>,
    /// Factor of q·k. Default: 1/√dim
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Scores")]
    scale: Option<f32>,
    /// ALiBi with these slopes, one a head; without F, those of the paper
    #[arg(long, value_name = "F", num_args = 0..=1, default_missing_value = "", help_heading = "Scores")]
    alibi: Option<String>,
    /// Added to the scores; broadcasts to [batch, heads, length, keys], aligned at the right
    #[arg(long, value_name = "F", help_heading = "Scores")]
    bias: Option<String>,
    /// Which keys a row sees, 1 or true; broadcasts like the bias
    #[arg(long, value_name = "F", help_heading = "Scores")]
    mask: Option<String>,
    /// Attention sinks, one logit a head
    #[arg(long, value_name = "F", help_heading = "Scores")]
    sinks: Option<String>,
}

const EXAMPLES: &str = "Examples:
  wgpu-attention attend --q q.npy --k k.npy --v v.npy --causal --out o.npy
  wgpu-attention attend --q a.safetensors:q --k a.safetensors:k --v a.safetensors:v \\
      --mask mask.npy --expect a.safetensors:o --show 0,0";

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    Bshd,
    Bhsd,
}

#[derive(Clone, Copy, ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
}

fn parse_pair(text: &str) -> Result<(u32, u32), String> {
    let pair = text.split_once(',').and_then(|(b, h)| Some((b.trim().parse().ok()?, h.trim().parse().ok()?)));
    pair.ok_or_else(|| "expected a sequence and a head, like 0,3".into())
}

fn parse_window(text: &str) -> Result<Window, String> {
    let side = |text: &str| match text.trim() {
        "none" => Ok(None),
        number if number.starts_with('-') => Err(format!("{number} is negative; an unlimited side is `none`")),
        number => number.parse().map(Some).map_err(|_| format!("`{number}` is neither a number of keys nor `none`")),
    };
    let (left, right) = text.split_once(',').ok_or("expected two sides, like 127,0 or none,0")?;
    Ok(Window { left: side(left)?, right: side(right)? })
}

/// Everything that the files say, checked against each other.
struct Problem {
    desc: AttentionDesc,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rows: Rows,
    kv_rows: Rows,
    starts: Starts,
    bias: Option<(Tensor, ScoreLayout)>,
    mask: Option<(Vec<u8>, ScoreLayout)>,
    /// A type of the kernels that is less precise than the file, if there is one.
    narrowed: Option<FileType>,
    order: Order,
}

/// How a tensor is divided into sequences.
enum Rows {
    Uniform { batch: u32, len: u32 },
    Padded { max_len: u32, lens: Vec<u32> },
    Ragged { offsets: Vec<u32> },
}

enum Starts {
    BottomRight,
    TopLeft,
    Explicit(Vec<i32>),
}

/// The dimensions of Q, K or V.
struct Dims {
    batch: Option<u32>,
    /// Of a sequence, or of all.
    len: u32,
    heads: u32,
    dim: u32,
}

pub fn run(args: &AttendArgs, global: &Global) -> Result<()> {
    for place in [&args.out, &args.lse].into_iter().flatten() {
        tensor::check_place(place)?;
    }
    let problem = Problem::read(args)?;
    let expected = Expected::read(args, &problem)?;
    problem.check_show(args.show)?;

    let engine = Engine::open(global)?;
    let batch = problem.batch();
    let input = problem.input()?;
    let answer = engine.attend(&problem.desc, &batch, &input)?;
    let picture = match args.show {
        Some((b, head)) => picture(&problem, &batch, &input, &answer, b, head)?,
        None => String::new(),
    };
    let mut comparisons = expected.compare(&answer)?;

    let mut report = summary(&problem, &batch, &engine, &answer);
    if let Some(page_len) = args.page_len {
        let paged = Paged::new(&problem.desc, &batch, &input, page_len)?;
        let same = engine
            .attend(&problem.desc, &paged.batch(&problem.desc, &batch), &paged.input(&input))
            .with_context(|| format!("in pages of {page_len} tokens; a smaller --page-len takes less memory"))?;
        let time = same.time.as_ref().map_or(String::new(), |time| format!(", {}", terminal::seconds(time.seconds)));
        let pages = format!("{} of {page_len} tokens, at random places of a pool{time}", paged.page_count());
        report += &line("pages", pages);
        for (what, paged, dense) in [("paged O", &same.out, &answer.out), ("paged LSE", &same.lse, &answer.lse)] {
            let allowed = args.tolerance.unwrap_or(tolerance(FileType::F32, largest(dense)));
            comparisons.push((what, compare(paged, dense, allowed)));
        }
    }
    for (what, comparison) in &comparisons {
        let verdict = match (comparison.passed(), what.starts_with("paged")) {
            (true, true) if comparison.error == 0.0 => "the same bits as without pages",
            (true, true) => "as without pages",
            (true, false) => "as expected",
            (false, _) => "NOT as expected",
        };
        report += &line(what, format!("{verdict}: {comparison}{}", comparison.details()));
    }
    if let Some((what, comparison)) = comparisons.iter().find(|(_, comparison)| !comparison.passed()) {
        terminal::print(report + &picture)?;
        bail!("{what} is not as expected ({comparison}); nothing is written");
    }
    write(args, &problem, &answer)?;
    for (what, place) in [("wrote O", &args.out), ("wrote LSE", &args.lse)] {
        report += &place.as_ref().map_or(String::new(), |place| line(what, place.clone()));
    }
    engine.keep();
    terminal::print(report + &picture)
}

impl Problem {
    fn read(args: &AttendArgs) -> Result<Problem> {
        let (q, k, v) = (tensor::read(&args.q)?, tensor::read(&args.k)?, tensor::read(&args.v)?);
        let q_dims = Dims::of(&q, args.layout, args.q_offsets.is_some(), "--q-offsets")?;
        let k_dims = Dims::of(&k, args.layout, args.kv_offsets.is_some(), "--kv-offsets")?;
        let v_dims = Dims::of(&v, args.layout, args.kv_offsets.is_some(), "--kv-offsets")?;
        let same = |what: &str, a: &Tensor, in_a: u32, b: &Tensor, in_b: u32| -> Result<()> {
            let (a, b) = (&a.source, &b.source);
            ensure!(in_a == in_b, "{what} differs: {in_a} in {a}, {in_b} in {b}; check the files and --layout");
            Ok(())
        };
        same("the dim of heads", &q, q_dims.dim, &k, k_dims.dim)?;
        same("the number of heads", &k, k_dims.heads, &v, v_dims.heads)?;
        same("the length", &k, k_dims.len, &v, v_dims.len)?;
        if let (Some(of_k), Some(of_v)) = (k_dims.batch, v_dims.batch) {
            same("the number of sequences", &k, of_k, &v, of_v)?;
        }
        let (heads, kv_heads) = (q_dims.heads, k_dims.heads);
        ensure!(
            kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
            "{heads} heads of {} cannot share {kv_heads} heads of {}; the first must be a multiple of the second, \
             check the files and --layout",
            q.source,
            k.source
        );
        let q_rows = Rows::read(&q_dims, args.q_offsets.as_deref(), None, &q)?;
        let kv_rows = Rows::read(&k_dims, args.kv_offsets.as_deref(), args.kv_lens.as_deref(), &k)?;
        let sequences = q_rows.lengths().batch();
        ensure!(
            sequences == kv_rows.lengths().batch(),
            "the number of sequences differs: {sequences} in Q, {} in K and V; check the files and offsets",
            kv_rows.lengths().batch()
        );

        let a_head = |place: &str, what: &str| numbers(place, what, heads as usize);
        let alibi = match args.alibi.as_deref() {
            None => None,
            Some("") => Some(alibi_slopes(heads)),
            Some(place) => Some(a_head(place, "one slope for each head")?),
        };
        let sinks = args.sinks.as_ref().map(|place| a_head(place, "one sink for each head")).transpose()?;
        let scores = [sequences as u32, heads, q_rows.longest(), kv_rows.longest()];
        let over_scores = |place: &String| -> Result<(Tensor, ScoreLayout)> {
            let tensor = tensor::read(place)?;
            let layout = small(&tensor).ok().and_then(|shape| ScoreLayout::broadcast(&shape, scores));
            let Some(layout) = layout else {
                let shape = &tensor.shape;
                bail!(
                    "{place} has the shape {shape:?}, which does not broadcast to {scores:?} (batch, heads, length, keys)"
                );
            };
            Ok((tensor, layout))
        };
        let bias = args.bias.as_ref().map(over_scores).transpose()?;
        let mask = args.mask.as_ref().map(over_scores).transpose()?;
        let mask = mask.map(|(tensor, layout)| Ok::<_, anyhow::Error>((bytes(&tensor)?, layout))).transpose()?;
        let kv_type = wider(file_dtype(&k)?, file_dtype(&v)?);
        let chosen = args.dtype.map(|dtype| match dtype {
            Type::F32 => DType::F32,
            Type::F16 => DType::F16,
            Type::Bf16 => DType::Bf16,
        });
        let desc = AttentionDesc {
            heads,
            kv_heads,
            head_dim: q_dims.dim,
            v_head_dim: Some(v_dims.dim),
            q_dtype: chosen.unwrap_or(file_dtype(&q)?),
            kv_dtype: chosen.unwrap_or(kv_type),
            out_dtype: DType::F32,
            scale: args.scale,
            causal: args.causal,
            window: args.window.unwrap_or_default(),
            softcap: args.softcap,
            alibi,
            sinks,
            bias: bias.as_ref().map(|(tensor, _)| file_dtype(tensor)).transpose()?,
            mask: mask.as_ref().map(|_| MaskKind::Bool),
            lse: true,
            variant: None,
        };
        desc.validate()?;
        let narrowed = [(desc.q_dtype, &q), (desc.kv_dtype, &k), (desc.kv_dtype, &v)]
            .into_iter()
            .filter(|(dtype, tensor)| precision(file_type(*dtype)) < precision(tensor.file_type))
            .map(|(dtype, _)| file_type(dtype))
            .next();
        let problem = Problem {
            q: rounded(q, desc.q_dtype)?,
            k: rounded(k, desc.kv_dtype)?,
            v: rounded(v, desc.kv_dtype)?,
            starts: Starts::read(&args.q_start, sequences)?,
            desc,
            q_rows,
            kv_rows,
            bias,
            mask,
            narrowed,
            order: args.layout,
        };
        problem.batch().validate()?;
        Ok(problem)
    }

    fn batch(&self) -> Batch<'_> {
        let desc = &self.desc;
        let mut batch = Batch::new(desc, self.q_rows.lengths(), self.kv_rows.lengths());
        let layout = |rows: &Rows, heads: u32, dim: u32| match self.order {
            Order::Bshd => Layout::bshd(rows.room(), heads, dim),
            Order::Bhsd => Layout::bhsd(rows.room(), heads, dim),
        };
        batch.q_layout = layout(&self.q_rows, desc.heads, desc.head_dim);
        batch.k_layout = layout(&self.kv_rows, desc.kv_heads, desc.head_dim);
        batch.v_layout = layout(&self.kv_rows, desc.kv_heads, desc.v_dim());
        batch.out_layout = layout(&self.q_rows, desc.heads, desc.v_dim());
        batch.bias_layout = self.bias.as_ref().map(|(_, layout)| *layout);
        batch.mask_layout = self.mask.as_ref().map(|(_, layout)| *layout);
        batch.start = match &self.starts {
            Starts::BottomRight => Start::BottomRight,
            Starts::TopLeft => Start::TopLeft,
            Starts::Explicit(starts) => Start::Explicit(starts),
        };
        batch
    }

    fn input(&self) -> Result<HostInput<'_>> {
        Ok(HostInput {
            q: self.q.floats()?,
            k: self.k.floats()?,
            v: self.v.floats()?,
            bias: self.bias.as_ref().map(|(bias, _)| bias.floats()).transpose()?,
            mask: self.mask.as_ref().map_or(HostMask::None, |(bytes, _)| HostMask::Bool(bytes)),
        })
    }

    fn out_shape(&self) -> Vec<usize> {
        let mut shape = self.q.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = self.desc.v_dim() as usize;
        }
        shape
    }

    fn lse_shape(&self) -> Vec<usize> {
        let (heads, room) = (self.desc.heads as usize, self.q_rows.room() as usize);
        match &self.q_rows {
            Rows::Ragged { .. } => vec![heads, room],
            rows => vec![rows.lengths().batch(), heads, room],
        }
    }

    fn check_show(&self, show: Option<(u32, u32)>) -> Result<()> {
        let Some((b, head)) = show else { return Ok(()) };
        let (sequences, heads) = (self.q_rows.lengths().batch(), self.desc.heads);
        ensure!((b as usize) < sequences, "--show {b},{head}: there are {sequences} sequences, counted from 0");
        ensure!(head < heads, "--show {b},{head}: there are {heads} heads, counted from 0");
        Ok(())
    }
}

impl Rows {
    fn read(dims: &Dims, offsets: Option<&str>, lens: Option<&str>, tensor: &Tensor) -> Result<Rows> {
        if let Some(place) = offsets {
            let offsets: Vec<u32> = integers(place)?;
            let (first, last) = (offsets.first().copied(), offsets.last().copied());
            ensure!(first == Some(0), "{place} must begin with 0, then the end of each sequence");
            ensure!(offsets.is_sorted(), "{place} must not descend: offsets are where sequences begin and end");
            let total = dims.len;
            ensure!(last == Some(total), "{place} must end with {total}, the length of {}", tensor.source);
            return Ok(Rows::Ragged { offsets });
        }
        let (batch, max_len) = (dims.batch.unwrap_or(1), dims.len);
        let Some(place) = lens else { return Ok(Rows::Uniform { batch, len: max_len }) };
        let lens: Vec<u32> = integers(place)?;
        let count = lens.len();
        ensure!(count == batch as usize, "{place} holds {count} lengths; {batch} are needed, one for each sequence");
        if let Some(len) = lens.iter().find(|len| **len > max_len) {
            bail!("{place} holds the length {len}, but {} has room for {max_len} keys", tensor.source);
        }
        Ok(Rows::Padded { max_len, lens })
    }

    fn lengths(&self) -> Lengths<'_> {
        match self {
            Rows::Uniform { batch, len } => Lengths::Uniform { batch: *batch, len: *len },
            Rows::Padded { max_len, lens } => Lengths::Padded { max_len: *max_len, lens },
            Rows::Ragged { offsets } => Lengths::Ragged { offsets },
        }
    }

    /// Rows or keys of a sequence in the tensor, or of all sequences if they lie one after the other.
    fn room(&self) -> u32 {
        match self {
            Rows::Uniform { len, .. } => *len,
            Rows::Padded { max_len, .. } => *max_len,
            Rows::Ragged { offsets } => offsets.last().copied().unwrap_or(0),
        }
    }

    /// What bias and mask have room for.
    fn longest(&self) -> u32 {
        match self {
            Rows::Ragged { offsets } => offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0),
            rows => rows.room(),
        }
    }
}

impl Starts {
    fn read(place: &str, sequences: usize) -> Result<Starts> {
        match place {
            "bottom-right" => return Ok(Starts::BottomRight),
            "top-left" => return Ok(Starts::TopLeft),
            _ => {}
        }
        let starts: Vec<i32> = integers(place).context("--q-start is bottom-right, top-left or a list")?;
        let count = starts.len();
        ensure!(count == sequences, "{place} holds {count} starts; {sequences} are needed, one for each sequence");
        Ok(Starts::Explicit(starts))
    }
}

impl Dims {
    fn of(tensor: &Tensor, order: Order, ragged: bool, flag: &str) -> Result<Dims> {
        let (source, shape) = (&tensor.source, small(tensor)?);
        let names = match (order, ragged) {
            (Order::Bshd, false) => "[batch, length, heads, dim]",
            (Order::Bhsd, false) => "[batch, heads, length, dim]",
            (Order::Bshd, true) => "[total, heads, dim]",
            (Order::Bhsd, true) => "[heads, total, dim]",
        };
        let (batch, rest) = match (ragged, shape.as_slice()) {
            (false, [batch, rest @ ..]) if rest.len() == 3 => (Some(*batch), rest),
            (true, rest) if rest.len() == 3 => (None, rest),
            (false, rest) if rest.len() == 3 => {
                bail!("{source} has the shape {shape:?}; without {flag} it must be {names}")
            }
            (true, _) => bail!("{source} has the shape {shape:?}; with {flag} it must be {names}"),
            (false, _) => bail!("{source} has the shape {shape:?}; it must be {names}"),
        };
        let (len, heads) = if order == Order::Bshd { (rest[0], rest[1]) } else { (rest[1], rest[0]) };
        ensure!(heads > 0 && rest[2] > 0, "{source} has the shape {shape:?}; {names} needs a head and a dim at least");
        Ok(Dims { batch, len, heads, dim: rest[2] })
    }
}

/// The shape in the numbers that kernels count with.
fn small(tensor: &Tensor) -> Result<Vec<u32>> {
    let lengths = tensor.shape.iter().map(|length| u32::try_from(*length));
    let (source, shape) = (&tensor.source, &tensor.shape);
    lengths.collect::<Result<_, _>>().map_err(|_| anyhow!("{source} has the shape {shape:?}; use less than 2^32"))
}

fn one_dimension(tensor: &Tensor) -> Result<()> {
    let (source, shape) = (&tensor.source, &tensor.shape);
    ensure!(shape.len() == 1, "{source} has the shape {shape:?}; it must be a list, with one dimension");
    Ok(())
}

fn integers<T: TryFrom<i64>>(place: &str) -> Result<Vec<T>> {
    let tensor = tensor::read(place)?;
    one_dimension(&tensor)?;
    let fit = |value: &i64| {
        let limits = if *value < 0 { "too small" } else { "too large" };
        T::try_from(*value).map_err(|_| anyhow!("{place} holds {value}, which is {limits}"))
    };
    tensor.ints()?.iter().map(fit).collect()
}

fn numbers(place: &str, what: &str, count: usize) -> Result<Vec<f32>> {
    let tensor = tensor::read(place)?;
    one_dimension(&tensor)?;
    let values = tensor.floats()?;
    ensure!(values.len() == count, "{place} holds {} numbers; {count} are needed, {what}", values.len());
    Ok(values.to_vec())
}

fn bytes(mask: &Tensor) -> Result<Vec<u8>> {
    Ok(mask.bools()?.into_iter().map(u8::from).collect())
}

/// The type in which kernels can read what the file holds.
fn file_dtype(tensor: &Tensor) -> Result<DType> {
    tensor.floats()?;
    Ok(match tensor.file_type {
        FileType::F16 => DType::F16,
        FileType::BF16 => DType::Bf16,
        _ => DType::F32,
    })
}

fn file_type(dtype: DType) -> FileType {
    match dtype {
        DType::F32 => FileType::F32,
        DType::F16 => FileType::F16,
        DType::Bf16 => FileType::BF16,
    }
}

/// A type that holds what both hold.
fn wider(a: DType, b: DType) -> DType {
    if a == b { a } else { DType::F32 }
}

/// Bits of the significand, at most those of f32.
fn precision(file_type: FileType) -> u32 {
    match file_type {
        FileType::BF16 => 8,
        FileType::F16 => 11,
        _ => 24,
    }
}

/// The values that `dtype` holds.
fn rounded(mut tensor: Tensor, dtype: DType) -> Result<Tensor> {
    let source = &tensor.source;
    if let Data::Float(values) = &mut tensor.data {
        for value in values {
            let rounded = dtype.round(*value);
            ensure!(
                rounded.is_finite() || !value.is_finite(),
                "{source} holds {value}, too large for {dtype}; choose another --dtype"
            );
            *value = rounded;
        }
    }
    Ok(tensor)
}

/// What the results are compared with, and how far they may be off.
struct Expected {
    out: Option<(Tensor, f64)>,
    lse: Option<(Tensor, f64)>,
}

impl Expected {
    fn read(args: &AttendArgs, problem: &Problem) -> Result<Expected> {
        if let Some(given) = args.tolerance {
            ensure!(given >= 0.0, "--tolerance {given}: expected a number from 0 on");
            ensure!(
                args.expect.is_some() || args.expect_lse.is_some(),
                "--tolerance is for --expect and --expect-lse; neither is there"
            );
        }
        let read = |place: &Option<String>, shape: Vec<usize>, scale: &dyn Fn(&[f32]) -> f64| {
            let Some(place) = place else { return Ok(None) };
            let tensor = tensor::read(place)?;
            ensure!(tensor.shape == shape, "{place} has the shape {:?}, but the result has {shape:?}", tensor.shape);
            let least = [Some(tensor.file_type), problem.narrowed].into_iter().flatten().min_by_key(|t| precision(*t));
            let default = tolerance(least.unwrap_or(FileType::F32), scale(tensor.floats()?));
            Ok(Some((tensor, args.tolerance.unwrap_or(default))))
        };
        let largest_v = largest(problem.v.floats()?);
        Ok(Expected {
            out: read(&args.expect, problem.out_shape(), &|_| largest_v)?,
            lse: read(&args.expect_lse, problem.lse_shape(), &|lse| largest(lse).max(1.0))?,
        })
    }

    fn compare(&self, answer: &Answer) -> Result<Vec<(&'static str, Comparison)>> {
        let mut comparisons = Vec::new();
        for (what, got, want) in [("O", &answer.out, &self.out), ("LSE", &answer.lse, &self.lse)] {
            if let Some((want, tolerance)) = want {
                comparisons.push((what, compare(got, want.floats()?, *tolerance)));
            }
        }
        Ok(comparisons)
    }
}

fn line(name: &str, value: impl Display) -> String {
    format!("{name:10} {value}\n")
}

fn summary(problem: &Problem, batch: &Batch, engine: &Engine, answer: &Answer) -> String {
    let desc = &problem.desc;
    let shape = |tensor: &Tensor, dtype: DType| format!("{:?} {dtype}", tensor.shape);
    let (q, k, v) = (&problem.q, &problem.k, &problem.v);
    let mut text = line("adapter", engine.label());
    if !answer.variants.is_empty() {
        text += &line("variants", answer.variants.join(", "));
    }
    let (q, k, v) = (shape(q, desc.q_dtype), shape(k, desc.kv_dtype), shape(v, desc.kv_dtype));
    text += &line("shapes", format!("Q {q}, K {k}, V {v}"));
    match &answer.time {
        None => text += &line("time", "nothing to compute"),
        Some(time) => {
            let flops = batch.flops(desc);
            text += &line("time", format!("{} ({})", terminal::seconds(time.seconds), time.method));
            let speed = terminal::digits(flops / time.seconds * 1e-12);
            text += &line("speed", format!("{speed} TFLOP/s ({} operations on visible keys)", terminal::digits(flops)));
        }
    }
    text
}

fn picture(problem: &Problem, batch: &Batch, input: &HostInput, answer: &Answer, b: u32, head: u32) -> Result<String> {
    let weights = weights(&problem.desc, batch, input, &answer.lse, b as usize, head)?;
    let mut text = format!("\nattention of sequence {b}, head {head}");
    if weights.step > 1 {
        text += &format!(", one of {} rows", weights.step);
    }
    text.push('\n');
    Ok(text + &terminal::map(&weights, terminal::width()))
}

fn write(args: &AttendArgs, problem: &Problem, answer: &Answer) -> Result<()> {
    let (out_shape, lse_shape) = (problem.out_shape(), problem.lse_shape());
    let file_type = match problem.q.file_type {
        FileType::F64 => FileType::F32,
        file_type => file_type,
    };
    let out = args.out.as_ref().map(|spec| Output { spec, shape: &out_shape, data: &answer.out, file_type });
    let lse =
        args.lse.as_ref().map(|spec| Output { spec, shape: &lse_shape, data: &answer.lse, file_type: FileType::F32 });
    tensor::write_all(&[out, lse].into_iter().flatten().collect::<Vec<_>>())
}
