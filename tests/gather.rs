//! Pages to dense tensors and back, bit by bit, on every adapter.

mod common;

use common::*;
use wgpu_attention::*;

const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC);

fn noise(elements: u64, dtype: DType, data: &mut Data) -> Vec<u8> {
    (0..(elements * dtype.size()).next_multiple_of(16)).map(|_| data.below(256) as u8).collect()
}

/// Three sequences, tokens `first` on of each, one without any.
const FIRST: [u32; 3] = [2, 0, 5];
const LENS: [u32; 3] = [9, 0, 4];
const OFFSETS: [u32; 4] = [0, 9, 9, 13];

#[test]
fn there_and_back_in_bits() {
    for (name, runtime) in runtimes() {
        let mut case = 0;
        for dtype in DType::ALL {
            for (kv_heads, head_dim) in [(1, 1), (3, 5), (2, 6), (2, 64), (1, 128)] {
                for page_len in [1, 3, 16] {
                    case += 1;
                    let what = format!("{name}: {dtype}, {kv_heads} heads of {head_dim}, pages of {page_len}");
                    let data = &mut Data::new(case);
                    let desc = GatherDesc { kv_heads, head_dim, dtype };
                    let needs = [0, 1, 2].map(|b| (FIRST[b] + LENS[b]).div_ceil(page_len));
                    let offsets = [0, needs[0], needs[0] + needs[1], needs[0] + needs[1] + needs[2]];
                    let mut pages: Vec<u32> = (1..=offsets[3]).collect();
                    for i in (1..pages.len()).rev() {
                        pages.swap(i, data.below(i as u32 + 1) as usize);
                    }
                    let table = PageTable { page_len, offsets: &offsets, pages: &pages };
                    let nhd = case % 2 == 0;
                    let pages_layout = match nhd {
                        true => Layout::bshd(page_len, kv_heads, head_dim),
                        false => Layout::bhsd(page_len, kv_heads, head_dim),
                    };
                    let (tokens, room) = match case % 3 {
                        0 => (Lengths::Ragged { offsets: &OFFSETS }, 13),
                        _ => (Lengths::Padded { max_len: 10, lens: &LENS }, 30),
                    };
                    let batch =
                        GatherBatch { first: Some(&FIRST), pages_layout, ..GatherBatch::new(&desc, table, tokens) };
                    let gather = Gather::new(runtime, &desc).unwrap();
                    let pool_len = u64::from(offsets[3] + 2) * pages_layout.batch;
                    let dense_len = u64::from(room * kv_heads * head_dim);
                    let pool = noise(pool_len, dtype, data);
                    let before = noise(dense_len, dtype, data);
                    let run = |pool: &[u8], dense: &[u8], direction| {
                        let pages = runtime.upload("pages", pool, STORAGE).unwrap();
                        let buffer = runtime.upload("dense", dense, STORAGE).unwrap();
                        let plan = gather.plan(&batch, direction).unwrap();
                        let mut encoder = runtime.device().create_command_encoder(&Default::default());
                        let io = GatherIo { pages: (&pages).into(), dense: (&buffer).into() };
                        match direction {
                            Direction::ToDense => gather.record(&mut encoder, &plan, &io).unwrap(),
                            Direction::ToPages => {
                                let mut pass = encoder.begin_compute_pass(&Default::default());
                                gather.record_in(&mut pass, &plan, &io).unwrap();
                            }
                        }
                        runtime.queue().submit([encoder.finish()]);
                        let written = if direction == Direction::ToDense { (&buffer, dense) } else { (&pages, pool) };
                        block(runtime.read(written.0, written.1.len() as u64)).unwrap()
                    };
                    // Both ways by hand.
                    let size = dtype.size() as usize;
                    let (mut want_dense, mut want_pool) = (before.clone(), noise(pool_len, dtype, data));
                    let other_pool = want_pool.clone();
                    for b in 0..3 {
                        for (token, head) in (0..LENS[b]).flat_map(|t| (0..kv_heads).map(move |h| (t, h))) {
                            let at = FIRST[b] + token;
                            let page = table.of(b)[(at / page_len) as usize];
                            let paged = u64::from(page) * pages_layout.batch
                                + u64::from(at % page_len) * pages_layout.seq
                                + u64::from(head) * pages_layout.head;
                            let row = if room == 13 { OFFSETS[b] + token } else { 10 * b as u32 + token };
                            let dense = (row * kv_heads + head) * head_dim;
                            let (paged, dense) = (paged as usize * size, dense as usize * size);
                            let len = head_dim as usize * size;
                            want_dense[dense..][..len].copy_from_slice(&pool[paged..][..len]);
                            want_pool[paged..][..len].copy_from_slice(&pool[paged..][..len]);
                        }
                    }
                    let dense = run(&pool, &before, Direction::ToDense);
                    assert!(dense == want_dense, "{what}: to dense");
                    assert!(run(&other_pool, &dense, Direction::ToPages) == want_pool, "{what}: to pages");
                }
            }
        }
    }
}

#[test]
fn bad_batches_are_refused() {
    let (_, runtime) = &runtimes()[0];
    let desc = GatherDesc { kv_heads: 1, head_dim: 4, dtype: DType::F32 };
    let gather = Gather::new(runtime, &desc).unwrap();
    let table = PageTable { page_len: 4, offsets: &[0, 2, 3], pages: &[1, 2, 1] };
    let tokens = Lengths::Padded { max_len: 8, lens: &[8, 4] };
    let batch = GatherBatch::new(&desc, table, tokens);
    assert!(gather.plan(&batch, Direction::ToDense).is_ok(), "shared pages can be read");
    for (batch, direction, message) in [
        (
            batch,
            Direction::ToPages,
            "pages: expected one token for each place, got two for slot 0 of page or sequence 1",
        ),
        (
            GatherBatch { first: Some(&[1, 0]), ..batch },
            Direction::ToDense,
            "page table: expected 3 pages for 9 tokens of sequence 0, got 2",
        ),
        (
            GatherBatch { first: Some(&[1]), ..batch },
            Direction::ToDense,
            "first: expected one for each of 2 sequences, got 1",
        ),
    ] {
        assert_eq!(gather.plan(&batch, direction).unwrap_err().to_string(), message);
    }
    let many = Lengths::Uniform { batch: u32::MAX, len: 0 };
    let error = gather.plan(&GatherBatch { tokens: many, ..batch }, Direction::ToDense).unwrap_err().to_string();
    assert_eq!(error, "page table: expected 4294967295 sequences, got 2");
    let far = GatherBatch { first: Some(&[u32::MAX, 0]), ..batch };
    assert!(matches!(gather.plan(&far, Direction::ToDense), Err(Error::Limit { .. })));
    let long = Lengths::Uniform { batch: 2, len: u32::MAX };
    assert!(gather.plan(&GatherBatch { tokens: long, ..batch }, Direction::ToDense).is_err());

    let small = runtime.upload("small", &[0; 64], STORAGE).unwrap();
    let plan = gather.plan(&batch, Direction::ToDense).unwrap();
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    let io = GatherIo { pages: (&small).into(), dense: (&small).into() };
    let error = gather.record(&mut encoder, &plan, &io).unwrap_err().to_string();
    assert!(error.contains("a buffer other than the outputs'"), "{error}");
    let other = runtime.upload("other", &[0; 64], STORAGE).unwrap();
    let io = GatherIo { dense: (&other).into(), ..io };
    let error = gather.record(&mut encoder, &plan, &io).unwrap_err().to_string();
    assert!(error.contains("pages: expected at least 192 bytes"), "{error}");
    for bad in [GatherDesc { kv_heads: 0, ..desc }, GatherDesc { head_dim: 0, ..desc }] {
        assert!(Gather::new(runtime, &bad).is_err());
    }
}

/// A batch of other length than the table's is refused at once, however long.
#[test]
fn more_sequences_than_the_table_has_are_refused() {
    let (name, runtime) = &runtimes()[0];
    let desc = GatherDesc { kv_heads: 1, head_dim: 4, dtype: DType::F32 };
    let table = PageTable { page_len: 4, offsets: &[0, 1], pages: &[0] };
    let batch = GatherBatch::new(&desc, table, Lengths::Uniform { batch: u32::MAX, len: 1 });
    let error = Gather::new(runtime, &desc).unwrap().plan(&batch, Direction::ToDense).unwrap_err().to_string();
    assert_eq!(error, "page table: expected 4294967295 sequences, got 1", "{name}");
}
