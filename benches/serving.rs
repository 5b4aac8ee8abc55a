//! What a server's step costs on the CPU, with criterion: `cargo bench --bench serving`. 256 sequences of about 512 tokens in
//! pages of 16 append a token each: the allocator, the page table, the plan of the writes, the schedule of the attention.
//!
//! On the best adapter or the one whose name holds `WGPU_ATTENTION_ADAPTER`; the plans write to its memory.

mod common;

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use wgpu_attention::{
    Append, AppendBatch, AppendDesc, Attention, AttentionDesc, DType, Lengths, NewToken, PageOrder, PagedCache,
    PagedCacheDesc, Pages, Rope, TableBuffer,
};

const SEQUENCES: u32 = 256;

fn serving(criterion: &mut Criterion) {
    let runtime = common::open();
    let mut pages = Pages::new(10_000, 16).unwrap();
    let mut copies = Vec::new();
    let ids: Vec<_> = (0..SEQUENCES).map(|_| pages.create()).collect();
    let lens: Vec<_> = ids.iter().zip(0..).map(|(id, i)| (*id, 256 + 2 * i)).collect();
    pages.append(&lens, &mut copies).unwrap();
    let one: Vec<_> = ids.iter().map(|id| (*id, 1)).collect();
    let mut group = criterion.benchmark_group("256 sequences");

    group.bench_function("append to pages", |bencher| {
        bencher.iter_batched_ref(
            || (pages.clone(), Vec::new()),
            |(pages, copies)| pages.append(&one, copies).unwrap(),
            BatchSize::LargeInput,
        );
    });
    let mut buffer = TableBuffer::default();
    group.bench_function("page table", |bencher| {
        bencher.iter(|| black_box(pages.table(&ids, &mut buffer).unwrap().1.len()));
    });

    let (table, lens) = pages.table(&ids, &mut buffer).unwrap();
    let cached = PagedCacheDesc {
        page_count: 10_000,
        page_len: 16,
        kv_heads: 1,
        head_dim: 128,
        v_head_dim: None,
        dtype: DType::F16,
        order: PageOrder::Hnd,
    };
    let cache = PagedCache::new(&runtime, &cached).unwrap();
    let desc = AppendDesc {
        heads: 4,
        kv_heads: 1,
        head_dim: 128,
        v_head_dim: None,
        dtype: DType::F16,
        cache_dtype: DType::F16,
        rope: Some(Rope::default()),
    };
    let append = Append::new(&runtime, &desc).unwrap();
    let rows = Lengths::Uniform { batch: SEQUENCES, len: 1 };
    group.bench_function("plan of the writes", |bencher| {
        bencher.iter(|| {
            let tokens = NewToken::last(rows, lens).unwrap();
            append.plan(&AppendBatch::on(&cache, &desc, &tokens, table).unwrap()).unwrap()
        });
    });
    let desc = AttentionDesc {
        heads: 4,
        kv_heads: 1,
        head_dim: 128,
        causal: true,
        q_dtype: DType::F16,
        kv_dtype: DType::F16,
        out_dtype: DType::F16,
        ..AttentionDesc::default()
    };
    let attention = Attention::new(&runtime, &desc).unwrap();
    group.bench_function("schedule of the attention", |bencher| {
        bencher.iter(|| {
            drop(attention.schedule(&cache.batch(&desc, rows, lens, table).unwrap()).unwrap());
            runtime.queue().submit([]); // the writes, as each step does
        });
    });
    group.bench_function("its plan alone", |bencher| {
        bencher.iter(|| attention.planned_items(&cache.batch(&desc, rows, lens, table).unwrap()).unwrap());
    });
    group.finish();
}

criterion_group!(benches, serving);
criterion_main!(benches);
