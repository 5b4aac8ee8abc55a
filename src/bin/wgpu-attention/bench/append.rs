//! Measures appends: checked, then timed.

use anyhow::Result;
use pollster::block_on;
use wgpu_attention::cases::{AppendCase, CaseData};
use wgpu_attention::measure::Timer;
use wgpu_attention::report::{CaseReport, Times, VariantReport};
use wgpu_attention::{
    Append, AppendBatch, AppendIo, DType, Lengths, NewToken, PageOrder, PagedCache, PagedCacheDesc, Pages, Runtime,
    TableBuffer,
};

use super::{Effort, MAX_REPEATS};

pub fn measure(runtime: &Runtime, timer: &Timer, effort: &Effort, case: &AppendCase) -> Result<CaseReport> {
    let desc = &case.desc;
    let page_count = case.batch * case.kv_len.div_ceil(case.page_len);
    let cached = PagedCacheDesc {
        page_count,
        page_len: case.page_len,
        kv_heads: desc.kv_heads,
        head_dim: desc.head_dim,
        v_head_dim: desc.v_head_dim,
        dtype: desc.cache_dtype,
        order: PageOrder::Hnd,
    };
    let cache = PagedCache::new(runtime, &cached)?;
    let mut pages = Pages::new(page_count, case.page_len)?;
    let ids: Vec<_> = (0..case.batch).map(|_| pages.create()).collect();
    // Page by page of all in turns, so that the pages of a sequence do not lie together.
    for first in (0..case.kv_len).step_by(case.page_len as usize) {
        let more = case.page_len.min(case.kv_len - first);
        pages.append(&ids.iter().map(|id| (*id, more)).collect::<Vec<_>>(), &mut Vec::new())?;
    }
    let mut buffer = TableBuffer::default();
    let (table, lens) = pages.table(&ids, &mut buffer)?;
    let tokens = NewToken::last(Lengths::Uniform { batch: case.batch, len: case.new }, lens)?;
    let append = Append::new(runtime, desc)?;
    let plan = append.plan(&AppendBatch::on(&cache, desc, &tokens, table)?)?;

    let data = case.data();
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let upload = |values: &[f32]| runtime.upload("rows", &desc.dtype.encode(values), usage);
    let (q, k, v) = (upload(&data.q)?, upload(&data.k)?, upload(&data.v)?);
    let turned = runtime.buffer("turned q", q.size(), usage)?;
    let q_io = Some(((&q).into(), (&turned).into()));
    let io = AppendIo { q: q_io, k: (&k).into(), v: (&v).into(), k_cache: cache.k(), v_cache: cache.v() };
    let run =
        |repeats: usize| block_on(timer.time(|pass| (0..repeats).try_for_each(|_| append.record_in(pass, &plan, &io))));
    let first = run(1)?;
    let checked = block_on(check(runtime, case, &data, &cache, pages.pages(ids[0])?, &turned))?;
    let mut report = CaseReport {
        name: case.name.clone(),
        flops: 0.0,
        bytes: case.bytes(),
        variants: Vec::new(),
        skipped: Vec::new(),
    };
    let variant =
        |times, failure| VariantReport { name: "default".into(), rows: vec!["append".into()], times, failure };
    report.variants.push(match checked {
        Err(wrong) => variant(None, Some(wrong)),
        Ok(error) => {
            let repeats = (effort.sample / first).ceil().clamp(1.0, MAX_REPEATS) as usize;
            let (mut samples, mut spent) = (Vec::new(), 0.0);
            while samples.is_empty() || (samples.len() < effort.samples && spent < effort.budget) {
                let seconds = run(repeats)?;
                spent += seconds;
                samples.push(seconds / repeats as f64);
            }
            variant(Times::of(&samples, repeats, 0.0, case.bytes(), error), None)
        }
    });
    Ok(report)
}

/// The rows of the first sequence: V in bits, Q and K within the rounding of their type.
async fn check(
    runtime: &Runtime,
    case: &AppendCase,
    data: &CaseData,
    cache: &PagedCache,
    pages: &[u32],
    turned: &wgpu::Buffer,
) -> Result<std::result::Result<f64, String>> {
    let (desc, cached) = (&case.desc, cache.desc());
    let read = async |view: wgpu_attention::View<'_>, layout: wgpu_attention::Layout| -> Result<Vec<f32>> {
        let elements = u64::from(cached.page_count) * layout.batch;
        let bytes = runtime.read(view.buffer, elements * cached.dtype.size()).await?;
        Ok(cached.dtype.decode(&bytes, elements as usize))
    };
    let (k, v) = (read(cache.k(), cached.k_layout()).await?, read(cache.v(), cached.v_layout()).await?);
    let q = desc.dtype.decode(&runtime.read(turned, turned.size()).await?, data.q.len());
    let mut worst = 0f64;
    for row in 0..case.new {
        let position = case.kv_len - case.new + row;
        let (page, slot) = (pages[(position / case.page_len) as usize], position % case.page_len);
        for (what, got, new, heads, dim, turns) in [
            ("q", &q, &data.q, desc.heads, desc.head_dim, true),
            ("k", &k, &data.k, desc.kv_heads, desc.head_dim, true),
            ("v", &v, &data.v, desc.kv_heads, desc.v_dim(), false),
        ] {
            let layout = if what == "k" { cached.k_layout() } else { cached.v_layout() };
            for head in 0..heads {
                let source = (row * heads + head) as usize * dim as usize;
                let new = &new[source..][..dim as usize];
                let at = match what {
                    "q" => source,
                    _ => {
                        (u64::from(page) * layout.batch + u64::from(slot) * layout.seq + u64::from(head) * layout.head)
                            as usize
                    }
                };
                let want = match (&desc.rope, turns) {
                    (Some(rope), true) => rope.apply(new, position)?,
                    _ => new.iter().map(|x| f64::from(*x)).collect(),
                };
                for (d, (got, want)) in got[at..][..dim as usize].iter().zip(want).enumerate() {
                    let error = (f64::from(*got) - want).abs();
                    let rounding =
                        if desc.cache_dtype == DType::F32 { 0.0 } else { 2f64.powi(-10) * want.abs().max(1e-2) };
                    if error.is_nan() || error > if turns { 1e-5 + rounding } else { 0.0 } {
                        return Ok(Err(format!("{what}, row {row}, head {head}, dim {d}: {got}, not {want}")));
                    }
                    worst = worst.max(error);
                }
            }
        }
    }
    Ok(Ok(worst))
}
