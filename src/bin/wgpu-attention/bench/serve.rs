//! `bench --serve`: a server's attention, simulated: requests arrive, are answered token by token and leave, once over a paged
//! cache and once over a contiguous one in the same memory.
//!
//! Requests, their lengths and the order of events are the same on every machine; times are those of one layer's writes and
//! attention on the device, from the page allocator to the end of a wait. Q, K and V of a token are looked up in a table, which
//! is not timed. The last row of every eighth request is compared with the oracle.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pollster::block_on;
use serde::Serialize;
use wgpu_attention::report::AdapterReport;
use wgpu_attention::{
    Append, AppendBatch, AppendDesc, AppendIo, Attention, AttentionDesc, AttentionIo, Batch, DType, Error, HostInput,
    HostMask, Lengths, NewToken, PageOrder, PagedCache, PagedCacheDesc, Pages, Rope, Runtime, SequenceId, TableBuffer,
    cases, reference,
};

use super::table;
use crate::terminal;

/// What is simulated.
struct Scale {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    requests: usize,
    /// Tokens that the cache has room for.
    memory: u32,
    /// Most tokens of a request, which a contiguous cache sets aside.
    max_len: u32,
    page_len: u32,
    /// Shortest and longest; lengths between are equally likely by their logarithm.
    prompt: (u32, u32),
    answer: (u32, u32),
    /// Steps from one arrival to the next on average.
    interval: f64,
    /// Most tokens of prompts that a step takes in.
    prefill: u32,
}

const QUICK: Scale = Scale {
    heads: 8,
    kv_heads: 2,
    head_dim: 64,
    requests: 32,
    memory: 2048,
    max_len: 512,
    page_len: 8,
    prompt: (32, 256),
    answer: (16, 256),
    interval: 2.0,
    prefill: 256,
};

const FULL: Scale = Scale {
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    requests: 400,
    memory: 1 << 18,
    max_len: 4096,
    page_len: 16,
    prompt: (128, 3072),
    answer: (64, 1024),
    interval: 3.0,
    prefill: 4096,
};

const VOCABULARY: u32 = 251;

/// A request, with what has been answered so far.
#[derive(Clone)]
struct Request {
    number: usize,
    arrives: usize, // step
    tokens: Vec<u32>,
    len: u32, // in the end
}

/// The outcome of one cache.
#[derive(Debug, Serialize)]
struct Served {
    cache: String,
    page_len: u32,
    steps: usize,
    seconds: f64,
    /// Tokens answered.
    tokens: usize,
    tokens_per_s: f64,
    /// Sequences at a time, mean and most.
    mean_running: f64,
    most_running: usize,
    /// Slots set aside for sequences in which no token lies, of all set aside; mean over the steps.
    waste: f64,
    /// Requests that lost their pages to others and were computed again.
    preempted: usize,
    /// Rows compared with the oracle, and the largest difference.
    checked: usize,
    error: f64,
    /// Sequences at each step.
    running: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct Report {
    version: String,
    adapter: AdapterReport,
    quick: bool,
    requests: usize,
    memory_tokens: u32,
    caches: Vec<Served>,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (cases::mix(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, (low, high): (u32, u32)) -> u32 {
        let (low, high) = (f64::from(low), f64::from(high) + 1.0);
        (low * (high / low).powf(self.next())) as u32
    }
}

fn requests(scale: &Scale) -> VecDeque<Request> {
    let mut random = Random(1);
    let mut step = 0.0;
    let request = |number| {
        step -= (1.0 - random.next()).ln() * scale.interval; // arrivals are a Poisson process
        let prompt = random.between(scale.prompt);
        let len = (prompt + random.between(scale.answer)).min(scale.max_len);
        let tokens = (0..prompt).map(|_| (random.next() * f64::from(VOCABULARY)) as u32).collect();
        Request { number, arrives: step as usize, tokens, len }
    };
    (0..scale.requests).map(request).collect()
}

pub fn run(runtime: &Runtime, quick: bool) -> Result<Outcome> {
    let scale = if quick { &QUICK } else { &FULL };
    let mut caches = Vec::new();
    for (cache, page_len) in [("paged", scale.page_len), ("contiguous", scale.max_len)] {
        caches.push(Server::new(runtime, scale, page_len)?.serve(cache)?);
    }
    Ok(Outcome(Report {
        version: env!("CARGO_PKG_VERSION").into(),
        adapter: AdapterReport::of(runtime),
        quick,
        requests: scale.requests,
        memory_tokens: scale.memory,
        caches,
    }))
}

struct Server<'a> {
    runtime: &'a Runtime,
    scale: &'a Scale,
    page_len: u32,
    desc: AttentionDesc,
    rope: Rope,
    cache: PagedCache,
    pages: Pages,
    append: Append,
    attention: Attention,
    /// Rows of Q, K and V of each token.
    rows: [Vec<f32>; 3],
}

impl<'a> Server<'a> {
    fn new(runtime: &'a Runtime, scale: &'a Scale, page_len: u32) -> Result<Self> {
        let Scale { heads, kv_heads, head_dim, .. } = *scale;
        let page_count = scale.memory / page_len;
        let desc = AttentionDesc {
            heads,
            kv_heads,
            head_dim,
            q_dtype: DType::F16,
            kv_dtype: DType::F16,
            out_dtype: DType::F16,
            causal: true,
            ..AttentionDesc::default()
        };
        let rope = Rope::default();
        let append = AppendDesc {
            heads,
            kv_heads,
            head_dim,
            v_head_dim: None,
            dtype: DType::F16,
            cache_dtype: DType::F16,
            rope: Some(rope.clone()),
        };
        let cached = PagedCacheDesc {
            page_count,
            page_len,
            kv_heads,
            head_dim,
            v_head_dim: None,
            dtype: DType::F16,
            order: PageOrder::Hnd,
        };
        let mut random = Random(2);
        let mut rows = |heads: u32| -> Vec<f32> {
            let values = (0..VOCABULARY * heads * head_dim).map(|_| DType::F16.round(2.0 * random.next() as f32 - 1.0));
            values.collect()
        };
        Ok(Server {
            runtime,
            scale,
            page_len,
            rope,
            cache: PagedCache::new(runtime, &cached)
                .context("the simulated cache does not fit here; --quick makes a small one")?,
            pages: Pages::new(page_count, page_len)?,
            append: Append::new(runtime, &append)?,
            attention: Attention::new(runtime, &desc)?,
            rows: [rows(heads), rows(kv_heads), rows(kv_heads)],
            desc,
        })
    }

    /// Rows of these tokens, as the device takes them.
    fn upload(&self, tokens: &[u32]) -> Result<[wgpu::Buffer; 3]> {
        let buffer = |rows: &[f32]| {
            let width = rows.len() / VOCABULARY as usize;
            let values: Vec<f32> =
                tokens.iter().flat_map(|token| &rows[*token as usize * width..][..width]).copied().collect();
            self.runtime.upload("rows", &DType::F16.encode(&values), wgpu::BufferUsages::STORAGE)
        };
        Ok([buffer(&self.rows[0])?, buffer(&self.rows[1])?, buffer(&self.rows[2])?])
    }

    fn serve(mut self, name: &str) -> Result<Served> {
        let mut waiting = requests(self.scale);
        let mut running: Vec<(SequenceId, Request)> = Vec::new();
        let progress = super::progress(waiting.len())?;
        progress.set_message(format!("serving from a {name} cache"));
        let mut served = Served {
            cache: name.into(),
            page_len: self.page_len,
            steps: 0,
            seconds: 0.0,
            tokens: 0,
            tokens_per_s: 0.0,
            mean_running: 0.0,
            most_running: 0,
            waste: 0.0,
            preempted: 0,
            checked: 0,
            error: 0.0,
            running: Vec::new(),
        };
        let mut copies = Vec::new();
        let mut buffer = TableBuffer::default();
        let mut step = 0;
        while !waiting.is_empty() || !running.is_empty() {
            if running.is_empty() && waiting.front().is_some_and(|request| request.arrives > step) {
                step = waiting[0].arrives; // nothing to do until then
            }
            let mut batch: Vec<(SequenceId, u32)> = running.iter().map(|(id, _)| (*id, 1)).collect();
            // Prompts come in while there is room for them and a token more of everyone.
            let mut taken = 0;
            while let Some(request) = waiting.front().filter(|request| request.arrives <= step) {
                let len = request.tokens.len() as u32;
                let pages = len.div_ceil(self.page_len) as usize + batch.len();
                if pages > self.pages.available() as usize || (taken > 0 && taken + len > self.scale.prefill) {
                    break;
                }
                taken += len;
                let id = self.pages.create();
                batch.push((id, len));
                running.extend(waiting.pop_front().map(|request| (id, request)));
            }
            let start = Instant::now();
            while let Err(error) = self.pages.append(&batch, &mut copies) {
                let Error::OutOfPages { .. } = error else { return Err(error.into()) };
                // The youngest waits, and is computed again.
                let (Some((id, request)), Some(_)) = (running.pop(), batch.pop()) else { return Err(error.into()) };
                self.pages.free(id)?;
                waiting.push_front(Request { arrives: step, ..request });
                served.preempted += 1;
            }
            if batch.is_empty() {
                bail!("a request of {} tokens does not fit in the cache", waiting[0].tokens.len());
            }
            let mut seconds = start.elapsed().as_secs_f64();

            let new: Vec<u32> = running
                .iter()
                .zip(&batch)
                .flat_map(|((_, request), (_, new))| &request.tokens[request.tokens.len() - *new as usize..])
                .copied()
                .collect();
            let [q, k, v] = self.upload(&new)?;
            let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
            let [turned, out] = [(); 2].map(|()| self.runtime.buffer("rows", q.size(), usage));
            let (turned, out) = (turned?, out?);
            self.runtime.wait()?;

            let start = Instant::now();
            let mut offsets = vec![0];
            for (_, count) in &batch {
                offsets.push(offsets[offsets.len() - 1] + count);
            }
            let rows = Lengths::Ragged { offsets: &offsets };
            let ids: Vec<SequenceId> = batch.iter().map(|(id, _)| *id).collect();
            let (table, lens) = self.pages.table(&ids, &mut buffer)?;
            let tokens = NewToken::last(rows, lens)?;
            let writes = self.append.plan(&AppendBatch::on(&self.cache, self.append.desc(), &tokens, table)?)?;
            let schedule = self.attention.schedule(&self.cache.batch(&self.desc, rows, lens, table)?)?;
            let mut encoder = self.runtime.device().create_command_encoder(&Default::default());
            self.cache.record_copies(&mut encoder, &copies)?;
            copies.clear();
            let (k_cache, v_cache) = (self.cache.k(), self.cache.v());
            let io =
                AppendIo { q: Some(((&q).into(), (&turned).into())), k: (&k).into(), v: (&v).into(), k_cache, v_cache };
            self.append.record(&mut encoder, &writes, &io)?;
            let (q, o) = ((&turned).into(), (&out).into());
            let io = AttentionIo { q, k: k_cache, v: v_cache, out: o, lse: None, bias: None, mask: None };
            self.attention.record(&mut encoder, &schedule, &io)?;
            self.runtime.queue().submit([encoder.finish()]);
            self.runtime.wait()?;
            seconds += start.elapsed().as_secs_f64();

            let stats = self.pages.stats();
            served.waste += stats.wasted_slots as f64 / (f64::from(stats.used) * f64::from(self.page_len));
            served.seconds += seconds;
            served.tokens += batch.len();
            served.running.push(running.len());
            for (i, (_, request)) in running.iter_mut().enumerate() {
                let last = request.tokens.len() as u32 == request.len;
                if last && request.number.is_multiple_of(8) {
                    let row = offsets[i + 1] - 1;
                    served.error = served.error.max(self.check(&request.tokens, &out, row)?);
                    served.checked += 1;
                }
                let next = request.tokens[request.tokens.len() / 2] * 7 + request.tokens.len() as u32;
                request.tokens.push(next % VOCABULARY);
            }
            let mut i = 0;
            while i < running.len() {
                if running[i].1.tokens.len() as u32 > running[i].1.len {
                    self.pages.free(running.remove(i).0)?;
                    progress.inc(1);
                } else {
                    i += 1;
                }
            }
            step += 1;
        }
        progress.finish_and_clear();
        let steps = served.running.len();
        served.steps = steps;
        served.waste /= steps as f64;
        served.mean_running = served.running.iter().sum::<usize>() as f64 / steps as f64;
        served.most_running = served.running.iter().copied().max().unwrap_or(0);
        served.tokens_per_s = served.tokens as f64 / served.seconds;
        Ok(served)
    }

    /// How far the row of the last token is from the oracle.
    fn check(&self, tokens: &[u32], out: &wgpu::Buffer, row: u32) -> Result<f64> {
        let desc = &self.desc;
        let (dim, kv_heads) = (desc.head_dim, desc.kv_heads);
        let width = (desc.heads * dim) as usize;
        let bytes = block_on(self.runtime.read(out, 2 * u64::from(row + 1) * width as u64))?;
        let got = DType::F16.decode(&bytes[2 * row as usize * width..], width);
        let of = |what: usize, token: u32, heads: u32| {
            let width = (heads * dim) as usize;
            &self.rows[what][token as usize * width..][..width]
        };
        let turned = |row: &[f32], position: usize| -> Result<Vec<f32>> {
            let heads = row.chunks(dim as usize).map(|head| self.rope.apply(head, position as u32));
            let heads = heads.collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(heads.concat().into_iter().map(|x| DType::F16.round(x as f32)).collect())
        };
        let last = tokens.len() - 1;
        let q = turned(of(0, tokens[last], desc.heads), last)?;
        let mut k = Vec::new();
        let mut v = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            k.extend(turned(of(1, *token, kv_heads), position)?);
            v.extend_from_slice(of(2, *token, kv_heads));
        }
        let lengths = |len| Lengths::Uniform { batch: 1, len };
        let batch = Batch::new(desc, lengths(1), lengths(tokens.len() as u32));
        let input = HostInput { q: &q, k: &k, v: &v, bias: None, mask: HostMask::None };
        let (want, _) = reference::attention::<f64>(desc, &batch, &input)?;
        let error = got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
        // O is below 1, rounded to f16; K and Q are rounded to f16 after they were turned, which may go either way.
        if error.is_nan() || error > 2e-3 {
            bail!("a row of attention over {} tokens is off by {error}; its times do not count", tokens.len());
        }
        Ok(error)
    }
}

/// What `--serve` found.
pub struct Outcome(Report);

impl Outcome {
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(&self.0)? + "\n")
    }

    pub fn show(&self) -> String {
        let Report { adapter, requests, memory_tokens, caches, .. } = &self.0;
        let mut text = format!(
            "{} ({}, {})\n{requests} requests, room for {memory_tokens} tokens; one layer, wall time\n\n",
            adapter.name, adapter.kind, adapter.driver
        );
        let mut table =
            table::table(&["cache", "tokens/s", "time", "steps", "sequences", "most", "waste", "preempted", "error"]);
        for served in caches {
            table.add_row([
                match served.cache.as_str() {
                    "paged" => format!("pages of {}", served.page_len),
                    name => format!("{name}, {} each", served.page_len),
                },
                terminal::digits(served.tokens_per_s),
                terminal::seconds(served.seconds),
                served.steps.to_string(),
                format!("{:.1}", served.mean_running),
                served.most_running.to_string(),
                format!("{:.1} %", 100.0 * served.waste),
                served.preempted.to_string(),
                format!("{:.0e}", served.error),
            ]);
        }
        text += &format!("{table}\n\nSequences at a time, over the steps:\n");
        let (steps, most) = caches
            .iter()
            .fold((1, 1), |(steps, most), served| (served.steps.max(steps), served.most_running.max(most)));
        for served in caches {
            text += &format!("{:10} {}\n", served.cache, plot(&served.running, steps, most));
        }
        if let [paged, contiguous] = caches.as_slice() {
            text += &format!(
                "\nIn the same memory pages serve {:.1}× as many sequences at a time, and their attention does {:.2}× the \
                 tokens/s.\nA step also reads the weights of the model once for all sequences, which is not in these times.\n\
                 {} rows were compared with the oracle.\n",
                paged.mean_running / contiguous.mean_running,
                paged.tokens_per_s / contiguous.tokens_per_s,
                paged.checked + contiguous.checked,
            );
        }
        text
    }
}

/// A line of bars, each the mean of its share of `steps`.
fn plot(values: &[usize], steps: usize, most: usize) -> String {
    const WIDTH: usize = 64;
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let share = steps.div_ceil(WIDTH);
    let bar = |values: &[usize]| {
        let mean = values.iter().sum::<usize>() as f64 / values.len() as f64;
        BARS[((mean / most as f64 * 8.0).ceil() as usize).clamp(1, 8) - 1]
    };
    values.chunks(share).map(bar).collect()
}
