//! A decoder's attention over a paged cache: `cargo run --release --example paged_decode`.
//!
//! Prompts of different lengths, a prefix that several share, a fork, tokens taken back, 200 steps. In place of a model, the Q, K
//! and V of a token are looked up in a table, and the next token follows from the ones before; every output is compared with
//! attention on dense keys, in f64.

use pollster::block_on;
use wgpu_attention::*;

const PAGE_LEN: u32 = 16;
const VOCABULARY: u32 = 97;
const HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 32;

type Answer<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// One layer's cache with what writes to it and what reads from it.
struct CachedDecoder {
    runtime: Runtime,
    cache: PagedCache,
    pages: Pages,
    append: Append,
    attention: Attention,
    // Kept from step to step.
    copies: Vec<PageCopy>,
    table: TableBuffer,
}

impl CachedDecoder {
    fn new(runtime: &Runtime, page_count: u32, rope: &Rope) -> Result<Self> {
        let cached = PagedCacheDesc {
            page_count,
            page_len: PAGE_LEN,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            v_head_dim: None,
            dtype: DType::F32,
            order: PageOrder::Hnd,
        };
        let append = AppendDesc {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            v_head_dim: None,
            dtype: DType::F32,
            cache_dtype: DType::F32,
            rope: Some(rope.clone()),
        };
        Ok(CachedDecoder {
            cache: PagedCache::new(runtime, &cached)?,
            pages: Pages::new(page_count, PAGE_LEN)?,
            append: Append::new(runtime, &append)?,
            attention: Attention::new(runtime, &attention_desc())?,
            runtime: runtime.clone(),
            copies: Vec::new(),
            table: TableBuffer::default(),
        })
    }

    /// Adds new tokens to each sequence and attends to all its tokens: rows of O, one for each new token. Prompts and single
    /// tokens go together, in one encoder.
    fn step(&mut self, batch: &[(SequenceId, u32)], q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>> {
        let ids: Vec<SequenceId> = batch.iter().map(|(id, _)| *id).collect();
        let mut offsets = vec![0];
        offsets.extend(batch.iter().scan(0, |end, (_, count)| {
            *end += count;
            Some(*end)
        }));
        let rows = Lengths::Ragged { offsets: &offsets };

        self.copies.clear();
        self.pages.append(batch, &mut self.copies)?; // or `Error::OutOfPages`, and nothing has changed
        let (table, lens) = self.pages.table(&ids, &mut self.table)?;
        let tokens = NewToken::last(rows, lens)?;
        let writes = self.append.plan(&AppendBatch::on(&self.cache, self.append.desc(), &tokens, table)?)?;
        let schedule = self.attention.schedule(&self.cache.batch(self.attention.desc(), rows, lens, table)?)?;

        let runtime = &self.runtime;
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let upload = |label, values| runtime.upload(label, bytemuck::cast_slice(values), usage);
        let (q, k, v) = (upload("q", q)?, upload("k", k)?, upload("v", v)?);
        let (turned, out) = (runtime.buffer("turned q", q.size(), usage)?, runtime.buffer("out", q.size(), usage)?);

        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let (k_cache, v_cache) = (self.cache.k(), self.cache.v());
        self.cache.record_copies(&mut encoder, &self.copies)?;
        let q = Some(((&q).into(), (&turned).into()));
        self.append.record(&mut encoder, &writes, &AppendIo { q, k: (&k).into(), v: (&v).into(), k_cache, v_cache })?;
        let (q, out_view) = ((&turned).into(), (&out).into());
        let io = AttentionIo { q, k: k_cache, v: v_cache, out: out_view, lse: None, bias: None, mask: None };
        self.attention.record(&mut encoder, &schedule, &io)?;
        runtime.queue().submit([encoder.finish()]);

        let elements = offsets[batch.len()] * HEADS * HEAD_DIM;
        Ok(bytemuck::pod_collect_to_vec(&block_on(runtime.read(&out, 4 * u64::from(elements)))?))
    }
}

fn attention_desc() -> AttentionDesc {
    AttentionDesc { heads: HEADS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, causal: true, ..AttentionDesc::default() }
}

/// A number for each value of a token's row, between −1 and 1.
fn value(token: u32, what: u32, i: u32) -> f32 {
    let mut bits = token.wrapping_mul(0x9e37_79b9) ^ what.wrapping_mul(0x85eb_ca6b) ^ i.wrapping_mul(0xc2b2_ae35);
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x045d_9f3b);
    ((bits ^ (bits >> 16)) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// The rows of new tokens: Q, K, V.
fn rows(tokens: &[u32]) -> [Vec<f32>; 3] {
    [(0, HEADS), (1, KV_HEADS), (2, KV_HEADS)].map(|(what, heads)| {
        tokens.iter().flat_map(|token| (0..heads * HEAD_DIM).map(move |i| value(*token, what, i))).collect()
    })
}

/// What a model would say next.
fn next(tokens: &[u32]) -> u32 {
    tokens.iter().rev().take(3).fold(tokens.len() as u32, |all, token| all.wrapping_mul(31) ^ token) % VOCABULARY
}

/// The last `count` rows of dense attention over all tokens of a sequence.
fn dense(tokens: &[u32], count: u32, rope: &Rope) -> Result<Vec<f64>> {
    let turn = |values: &[f32]| -> Result<Vec<f32>> {
        let heads = values.len() as u32 / HEAD_DIM / tokens.len() as u32;
        let turned = values.chunks(HEAD_DIM as usize).zip(0..).map(|(row, i)| rope.apply(row, i / heads));
        Ok(turned.collect::<Result<Vec<_>>>()?.concat().into_iter().map(|x| x as f32).collect())
    };
    let [q, k, v] = rows(tokens);
    let (q, k) = (turn(&q)?, turn(&k)?);
    let len = tokens.len() as u32;
    let lengths = |len| Lengths::Uniform { batch: 1, len };
    let desc = attention_desc();
    let q = &q[((len - count) * HEADS * HEAD_DIM) as usize..];
    let input = HostInput { q, k: &k, v: &v, bias: None, mask: HostMask::None };
    Ok(reference::attention::<f64>(&desc, &Batch::new(&desc, lengths(count), lengths(len)), &input)?.0)
}

/// A sequence as its user knows it.
struct Text {
    name: &'static str,
    id: SequenceId,
    tokens: Vec<u32>,
}

pub fn main() -> Answer<()> {
    let adapter = block_on(adapters()).into_iter().next().ok_or("no GPU adapter: install a Vulkan driver")?;
    let runtime = block_on(Runtime::open(&adapter, RuntimeOptions::default()))?;
    let rope = Rope::default();
    let mut decoder = CachedDecoder::new(&runtime, 100, &rope)?;
    let mut worst = 0f64;
    let mut count = 0u32;
    // One step of these texts, each with so many of its last tokens new; compared with dense attention.
    let mut step = |decoder: &mut CachedDecoder, texts: &[(&Text, u32)]| -> Answer<()> {
        let batch: Vec<_> = texts.iter().map(|(text, new)| (text.id, *new)).collect();
        let new: Vec<u32> =
            texts.iter().flat_map(|(text, new)| text.tokens[text.tokens.len() - *new as usize..].to_vec()).collect();
        let [q, k, v] = rows(&new);
        let got = decoder.step(&batch, &q, &k, &v)?;
        let mut want = Vec::new();
        for (text, new) in texts {
            want.extend(dense(&text.tokens, *new, &rope)?);
        }
        let error = got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
        if error.is_nan() || error > 1e-5 || got.len() != want.len() {
            let names: Vec<_> = texts.iter().map(|(text, _)| text.name).collect();
            return Err(format!("step {count} of {}: off by {error}", names.join(", ")).into());
        }
        worst = worst.max(error);
        count += 1;
        Ok(())
    };

    // Three prompts of different lengths; two begin with the same 40 tokens, of which two whole pages are computed once.
    let system: Vec<u32> = (0..40).map(|i| i * 7 % VOCABULARY).collect();
    let prompts = [("first", [&system[..], &[1, 2, 3]].concat()), ("second", [&system[..], &[4; 30]].concat())];
    let mut texts = Vec::new();
    for (name, tokens) in prompts.into_iter().chain([("third", vec![5])]) {
        let (id, found) = decoder.pages.create_with_prefix(&tokens[..tokens.len() - 1]);
        println!("{name}: a prompt of {} tokens, {found} of them in the prefix cache", tokens.len());
        let text = Text { name, id, tokens };
        step(&mut decoder, &[(&text, text.tokens.len() as u32 - found)])?;
        decoder.pages.publish(text.id, &text.tokens)?;
        texts.push(text);
    }

    for round in 0..200 {
        if round == 50 {
            let first = &texts[0];
            let fork = Text { name: "fork", id: decoder.pages.fork(first.id)?, tokens: first.tokens.clone() };
            println!("after 50 steps the first is forked, {} tokens, and nothing is copied", fork.tokens.len());
            texts.push(fork);
            texts[3].tokens.push(11); // the two go different ways
            texts[0].tokens.push(12);
            let new: Vec<_> = [0, 3].map(|i| (&texts[i], 1)).into();
            step(&mut decoder, &new)?;
        }
        // Speculative decoding: three tokens are drafted for the third, and two of them taken back.
        let drafted = if round % 10 == 0 { 3 } else { 1 };
        for (i, text) in texts.iter_mut().enumerate() {
            for _ in 0..if i == 2 { drafted } else { 1 } {
                let token = next(&text.tokens);
                text.tokens.push(token);
            }
        }
        let new: Vec<_> = texts.iter().enumerate().map(|(i, text)| (text, if i == 2 { drafted } else { 1 })).collect();
        step(&mut decoder, &new)?;
        let third = &mut texts[2];
        third.tokens.truncate(third.tokens.len() + 1 - drafted as usize);
        decoder.pages.truncate(third.id, third.tokens.len() as u32)?;
    }
    let stats = decoder.pages.stats();
    let PageStats { pages, used, shared, tokens, wasted_slots, .. } = stats;
    println!("{count} steps on {}: never farther from dense attention than {worst:.1e}", adapter.get_info().name);
    println!(
        "{tokens} tokens in {used} of {pages} pages of {PAGE_LEN}; {shared} pages shared, {wasted_slots} slots empty"
    );
    for text in texts {
        decoder.pages.free(text.id)?;
    }
    let PageStats { used, cached, free, .. } = decoder.pages.stats();
    println!("freed: {used} pages used, {cached} kept by the prefix cache, {free} free");
    Ok(())
}
