//! Page pools on every adapter: attention over pages, copies in order, swapping, limits.

mod common;

use common::*;
use wgpu_attention::*;

const ORDERS: [PageOrder; 2] = [PageOrder::Hnd, PageOrder::Nhd];

fn desc(page_count: u32, page_len: u32, kv_heads: u32, head_dim: u32) -> PagedCacheDesc {
    PagedCacheDesc {
        page_count,
        page_len,
        kv_heads,
        head_dim,
        v_head_dim: None,
        dtype: DType::F32,
        order: PageOrder::Hnd,
    }
}

/// Shapes with whole words and without, down to a page of one 16-bit element.
fn shapes() -> Vec<PagedCacheDesc> {
    let mut all = Vec::new();
    for order in ORDERS {
        for dtype in DType::ALL {
            all.extend([
                PagedCacheDesc { dtype, order, ..desc(24, 4, 2, 8) },
                PagedCacheDesc { dtype, order, v_head_dim: Some(3), ..desc(24, 3, 1, 5) },
                PagedCacheDesc { dtype, order, v_head_dim: Some(2), ..desc(60, 1, 1, 1) },
            ]);
        }
    }
    all
}

fn submit(runtime: &Runtime, record: impl FnOnce(&mut wgpu::CommandEncoder)) {
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    record(&mut encoder);
    runtime.queue().submit([encoder.finish()]);
}

/// A pool on the host, element by element; `None` where anything may be.
struct Mirror {
    elements: Vec<Option<Vec<u8>>>,
    layout: Layout,
    size: usize,
    dims: [u32; 3], // heads, slots, dim
}

impl Mirror {
    /// Random bits, NaNs of any payload among them.
    fn random(desc: &PagedCacheDesc, layout: Layout, dim: u32, data: &mut Data) -> Self {
        let count = u64::from(desc.page_count) * layout.batch;
        let size = desc.dtype.size() as usize;
        let elements = (0..count).map(|_| Some((0..size).map(|_| data.below(256) as u8).collect())).collect();
        Mirror { elements, layout, size, dims: [desc.kv_heads, desc.page_len, dim] }
    }

    fn bytes(&self) -> Vec<u8> {
        self.elements.iter().flat_map(|element| element.as_ref().unwrap().iter().copied()).collect()
    }

    fn copy(&mut self, copy: &PageCopy) {
        if copy.from == copy.to || copy.slots == 0 {
            return;
        }
        let page = |id: u32| (u64::from(id) * self.layout.batch) as usize;
        let mut copied = vec![None; self.layout.batch as usize];
        let [heads, _, dim] = self.dims;
        for (head, slot) in (0..heads).flat_map(|head| (0..copy.slots).map(move |slot| (head, slot))) {
            for d in 0..dim {
                let at = u64::from(slot) * self.layout.seq + u64::from(head) * self.layout.head + u64::from(d);
                copied[at as usize] = self.elements[page(copy.from) + at as usize].clone();
            }
        }
        self.elements[page(copy.to)..][..copied.len()].clone_from_slice(&copied);
    }

    fn check(&self, bytes: &[u8], what: &str) {
        assert_eq!(bytes.len(), self.elements.len() * self.size, "{what}");
        for (at, (got, want)) in bytes.chunks_exact(self.size).zip(&self.elements).enumerate() {
            assert!(want.as_ref().is_none_or(|want| want == got), "{what}: element {at} is {got:?}, not {want:?}");
        }
    }
}

/// A cache of random bits, and the same on the host: K, V.
fn random(runtime: &Runtime, desc: &PagedCacheDesc, seed: u64) -> (PagedCache, [Mirror; 2]) {
    let cache = PagedCache::new(runtime, desc).unwrap();
    let data = &mut Data::new(seed);
    let mirrors = [
        Mirror::random(desc, desc.k_layout(), desc.head_dim, data),
        Mirror::random(desc, desc.v_layout(), desc.v_dim(), data),
    ];
    for (view, mirror) in [cache.k(), cache.v()].into_iter().zip(&mirrors) {
        runtime.queue().write_buffer(view.buffer, 0, &mirror.bytes());
    }
    (cache, mirrors)
}

fn check(runtime: &Runtime, cache: &PagedCache, mirrors: &[Mirror; 2], what: &str) {
    for ((pool, view), mirror) in [("K", cache.k()), ("V", cache.v())].into_iter().zip(mirrors) {
        let size = (mirror.elements.len() * mirror.size) as u64;
        mirror.check(&block(runtime.read(view.buffer, size)).unwrap(), &format!("{what}: {pool}"));
    }
}

/// Chains, pages that are read and then written, written twice, copied to themselves: as one after the other.
#[test]
fn copies_are_done_in_their_order() {
    for (name, runtime) in runtimes() {
        for (seed, desc) in shapes().into_iter().enumerate() {
            let (cache, mut mirrors) = random(runtime, &desc, seed as u64);
            let mut data = Data::new(100 + seed as u64);
            let full = desc.page_len;
            let copy = |from, to, slots| PageCopy { from, to, slots };
            let mut copies =
                vec![copy(0, 1, full), copy(1, 2, full), copy(3, 0, full), copy(5, 4, full), copy(6, 4, 1)];
            copies.extend((0..40).map(|_| copy(data.below(12), data.below(12), data.below(full + 1))));
            let (first, second) = copies.split_at(20);
            submit(runtime, |encoder| {
                cache.record_copies(encoder, first).unwrap();
                cache.record_copies(encoder, &[]).unwrap();
                cache.record_copies(encoder, second).unwrap();
            });
            for copy in &copies {
                mirrors.iter_mut().for_each(|mirror| mirror.copy(copy));
            }
            let known = mirrors.iter().map(|mirror| mirror.elements.iter().flatten().count()).sum::<usize>();
            let all = mirrors.iter().map(|mirror| mirror.elements.len()).sum::<usize>();
            assert!(2 * known >= all, "hardly anything is checked: {known} of {all}");
            check(runtime, &cache, &mirrors, &format!("{name}: {desc:?}"));
        }
    }
}

/// More copies than workgroups fit in one dimension, and a page of more words than one round of a copy takes.
#[test]
fn many_copies_and_large_pages() {
    for (name, runtime) in runtimes() {
        let many = PagedCacheDesc { dtype: DType::F16, ..desc(70_001, 1, 1, 1) };
        let (cache, mut mirrors) = random(runtime, &many, 1);
        let copies: Vec<_> = (1..=70_000).map(|to| PageCopy { from: 0, to, slots: 1 }).collect();
        submit(runtime, |encoder| cache.record_copies(encoder, &copies).unwrap());
        for copy in &copies {
            mirrors.iter_mut().for_each(|mirror| mirror.copy(copy));
        }
        check(runtime, &cache, &mirrors, name);

        let large = desc(3, 256, 2, 33);
        let (cache, mut mirrors) = random(runtime, &large, 2);
        let copies = [PageCopy { from: 2, to: 0, slots: 256 }, PageCopy { from: 0, to: 1, slots: 7 }];
        submit(runtime, |encoder| cache.record_copies(encoder, &copies).unwrap());
        for copy in &copies {
            mirrors.iter_mut().for_each(|mirror| mirror.copy(copy));
        }
        check(runtime, &cache, &mirrors, name);
    }
}

/// Out and into other pages: the same bits there, and no bit elsewhere changes.
#[test]
fn swapping_is_exact() {
    for (name, runtime) in runtimes() {
        for (seed, desc) in shapes().into_iter().enumerate() {
            let what = format!("{name}: {desc:?}");
            let (cache, mut mirrors) = random(runtime, &desc, 40 + seed as u64);
            let (out, back) = ([5, 0, 23, 7], [7, 1, 2, 23]);
            let bytes = block(cache.swap_out(&out)).unwrap();
            assert_eq!(bytes.len() as u64, 4 * desc.page_bytes(), "{what}");
            cache.swap_in(&back, &bytes).unwrap();
            for mirror in &mut mirrors {
                let len = mirror.layout.batch as usize;
                let before = mirror.elements.clone();
                for (from, to) in out.into_iter().zip(back) {
                    mirror.elements[to as usize * len..][..len].clone_from_slice(&before[from as usize * len..][..len]);
                }
            }
            check(runtime, &cache, &mirrors, &what);
            assert_eq!(block(cache.swap_out(&back)).unwrap(), bytes, "{what}");
            assert!(block(cache.swap_out(&[])).unwrap().is_empty(), "{what}");
            cache.swap_in(&[], &[]).unwrap();

            let refused = |pages: &[u32], bytes: &[u8], part: &str| {
                let error = cache.swap_in(pages, bytes).unwrap_err();
                assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains(part), "{what}: {error}");
            };
            refused(&back, &bytes[1..], "bytes: expected");
            refused(&back[1..], &bytes, "bytes: expected");
            refused(&[7, 1, 2, 7], &bytes, "page 7 twice");
            refused(&[7, 1, 2, desc.page_count], &bytes, "page: expected less than");
            assert!(matches!(block(cache.swap_out(&[u32::MAX])), Err(Error::Shape { .. })), "{what}");
            check(runtime, &cache, &mirrors, &what);
        }
    }
}

/// Sequences that share pages, part, are copied and written, in pools full of NaN: attention over the pages is attention over
/// the tokens.
#[test]
fn attention_over_pages_is_attention_over_tokens() {
    for (name, runtime) in runtimes() {
        for (seed, shape) in shapes().into_iter().enumerate() {
            let what = format!("{name}: {shape:?}");
            let attention = AttentionDesc {
                heads: 2 * shape.kv_heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                v_head_dim: shape.v_head_dim,
                kv_dtype: shape.dtype,
                causal: true,
                lse: true,
                ..AttentionDesc::default()
            };
            let cache = PagedCache::new(runtime, &shape).unwrap();
            let mut pages = Pages::new(shape.page_count, shape.page_len).unwrap();
            // A prefix of 10 tokens, then three continuations.
            let first = pages.create();
            let mut copies = Vec::new();
            pages.append(&[(first, 10)], &mut copies).unwrap();
            let ids = [first, pages.fork(first).unwrap(), pages.fork(first).unwrap()];
            let more = [5, 1, 3];

            let mut data = Data::new(70 + seed as u64);
            let (max_len, dims) = (15, [shape.head_dim, shape.v_dim()]);
            let kv_lens = more.map(|more| 10 + more);
            let kv = Lengths::Padded { max_len, lens: &kv_lens };
            let rows = Lengths::Uniform { batch: 3, len: 3 };
            let dense = Batch::new(&attention, rows, kv);
            let mut tensors = Tensors::random(&attention, &dense, &mut data);
            let token = |dim: u32| (shape.kv_heads * dim) as usize;
            for (values, dim) in [(&mut tensors.k, dims[0]), (&mut tensors.v, dims[1])] {
                let sequence = max_len as usize * token(dim);
                let prefix = values[..10 * token(dim)].to_vec();
                values[sequence..][..prefix.len()].copy_from_slice(&prefix);
                values[2 * sequence..][..prefix.len()].copy_from_slice(&prefix);
            }

            let layouts = [shape.k_layout(), shape.v_layout()];
            let mut pools = layouts.map(|layout| vec![f32::NAN; (u64::from(shape.page_count) * layout.batch) as usize]);
            let put = |pools: &mut [Vec<f32>; 2], pages: &Pages, b: usize, positions: std::ops::Range<u32>| {
                for position in positions {
                    let (page, slot) = pages.slot(ids[b], position).unwrap();
                    for (i, values) in [&tensors.k, &tensors.v].into_iter().enumerate() {
                        let dim = dims[i] as usize;
                        for head in 0..shape.kv_heads as usize {
                            let row = (b * max_len as usize + position as usize) * shape.kv_heads as usize + head;
                            let layout = &layouts[i];
                            let at = page as usize * layout.batch as usize
                                + slot as usize * layout.seq as usize
                                + head * layout.head as usize;
                            pools[i][at..][..dim].copy_from_slice(&values[row * dim..][..dim]);
                        }
                    }
                }
            };
            let write = |pools: &[Vec<f32>; 2]| {
                for (view, pool) in [cache.k(), cache.v()].into_iter().zip(pools) {
                    runtime.queue().write_buffer(view.buffer, 0, &shape.dtype.encode(pool));
                }
            };
            put(&mut pools, &pages, 0, 0..10);
            write(&pools);
            let batch: Vec<_> = ids.into_iter().zip(more).collect();
            pages.append(&batch, &mut copies).unwrap();
            let shared = if 10 % shape.page_len == 0 { 0 } else { 2 };
            assert_eq!(copies.len(), shared, "{what}");
            submit(runtime, |encoder| cache.record_copies(encoder, &copies).unwrap());
            // What the device copied, then the new tokens.
            for ((view, pool), layout) in [cache.k(), cache.v()].into_iter().zip(&mut pools).zip(&layouts) {
                let bytes = u64::from(shape.page_count) * layout.batch * shape.dtype.size();
                *pool = shape.dtype.decode(&block(runtime.read(view.buffer, bytes)).unwrap(), pool.len());
            }
            for (b, len) in kv_lens.into_iter().enumerate() {
                put(&mut pools, &pages, b, 10..len);
            }
            write(&pools);

            let mut buffer = TableBuffer::default();
            let (table, lens) = pages.table(&ids, &mut buffer).unwrap();
            assert_eq!(lens, kv_lens);
            let kernel = Attention::new(runtime, &attention).unwrap();
            let paged = cache.batch(&attention, rows, lens, table).unwrap();
            let schedule = kernel.schedule(&paged).unwrap();
            let q = runtime.upload("q", &DType::F32.encode(&tensors.q), wgpu::BufferUsages::STORAGE).unwrap();
            let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
            let expected = Expected::of(&attention, &dense, &tensors.input());
            let result = |len: usize| runtime.buffer("result", 4 * len as u64, usage).unwrap();
            let (out, lse) = (result(expected.out.len()), result(expected.lse.len()));
            submit(runtime, |encoder| {
                let (out, lse) = ((&out).into(), Some((&lse).into()));
                let (k, v, q) = (cache.k(), cache.v(), (&q).into());
                kernel.record(encoder, &schedule, &AttentionIo { q, k, v, out, lse, bias: None, mask: None }).unwrap();
            });
            let read = |buffer: &wgpu::Buffer, len: usize| {
                DType::F32.decode(&block(runtime.read(buffer, 4 * len as u64)).unwrap(), len)
            };
            let got = HostOutput { out: read(&out, expected.out.len()), lse: read(&lse, expected.lse.len()) };
            expected.check(&got, true, &what);
        }
    }
}

/// What does not fit is refused by a message that says what would, and nothing is recorded.
#[test]
fn wrong_pages_and_heads_are_refused() {
    for (name, runtime) in runtimes() {
        let shape = desc(8, 4, 2, 16);
        let (cache, mirrors) = random(runtime, &shape, 5);
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        for (copy, message) in [
            (PageCopy { from: 8, to: 1, slots: 4 }, "page: expected less than the cache's 8, got 8"),
            (PageCopy { from: 0, to: u32::MAX, slots: 0 }, "page: expected less than the cache's 8, got 4294967295"),
            (PageCopy { from: 0, to: 1, slots: 5 }, "slots of a copy: expected at most 4, got 5"),
        ] {
            let good = PageCopy { from: 2, to: 3, slots: 4 };
            let error = cache.record_copies(&mut encoder, &[good, copy]).unwrap_err();
            assert!(matches!(error, Error::Shape { .. }), "{name}: {error}");
            assert_eq!(error.to_string(), message, "{name}");
        }
        runtime.queue().submit([encoder.finish()]);
        check(runtime, &cache, &mirrors, name);

        let attention = AttentionDesc { heads: 4, kv_heads: 2, head_dim: 16, ..AttentionDesc::default() };
        let table = PageTable { page_len: 4, offsets: &[0, 2], pages: &[7, 0] };
        let rows = Lengths::Uniform { batch: 1, len: 1 };
        cache.batch(&attention, rows, &[8], table).unwrap();
        let refused = |attention: AttentionDesc, table: PageTable, part: &str| {
            let error = cache.batch(&attention, rows, &[8], table).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(part), "{name}: {error}");
        };
        refused(AttentionDesc { kv_heads: 1, ..attention.clone() }, table, "kv_heads: expected 2");
        refused(
            AttentionDesc { head_dim: 8, v_head_dim: Some(16), ..attention.clone() },
            table,
            "head_dim: expected 16",
        );
        refused(AttentionDesc { v_head_dim: Some(8), ..attention.clone() }, table, "v_head_dim: expected 16");
        refused(AttentionDesc { kv_dtype: DType::F16, ..attention.clone() }, table, "kv_dtype: expected f32");
        refused(attention.clone(), PageTable { page_len: 8, ..table }, "page_len of the table: expected 4");
        refused(attention.clone(), PageTable { pages: &[8, 0], ..table }, "page: expected less than the cache's 8");
    }
}

/// A pool is as large as what the device binds, not a page larger, and the error says how many pages would do.
#[test]
fn limits_are_told_in_pages() {
    for adapter in block(adapters()) {
        let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 20, ..Default::default() };
        let (device, queue) =
            block(adapter.request_device(&wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() }))
                .unwrap();
        let options = || RuntimeOptions { self_test: SelfTest::Skip, ..RuntimeOptions::default() };
        let runtime = block(Runtime::new(device, queue, options())).unwrap();
        // 1 KiB a page.
        let shape = desc(1, 16, 2, 8);
        assert_eq!((shape.page_bytes(), shape.max_pages(&runtime).unwrap()), (2048, 1024));
        let full = PagedCacheDesc { page_count: 1024, ..shape };
        let cache = PagedCache::new(&runtime, &full).unwrap();
        submit(&runtime, |encoder| cache.record_copies(encoder, &[PageCopy { from: 0, to: 1023, slots: 16 }]).unwrap());
        runtime.wait().unwrap();
        match PagedCache::new(&runtime, &PagedCacheDesc { page_count: 1025, ..shape }) {
            Err(Error::Limit { limit: 1024, value: 1025, hint, .. }) => {
                assert!(hint.contains("max_storage_buffer_binding_size"), "{hint}");
            }
            other => panic!("{other:?}"),
        }
        // The wider of K and V decides; a page of one 16-bit element takes a word.
        assert_eq!(PagedCacheDesc { v_head_dim: Some(16), ..shape }.max_pages(&runtime).unwrap(), 512);
        let tiny = PagedCacheDesc { dtype: DType::F16, ..desc(1, 1, 1, 1) };
        assert_eq!((tiny.page_bytes(), tiny.max_pages(&runtime).unwrap()), (8, 1 << 18));
        // Numbers past 64 bits.
        let huge = desc(u32::MAX, 1 << 29, 2048, 512);
        assert_eq!(huge.max_pages(&runtime).unwrap(), 0);
        assert!(matches!(PagedCache::new(&runtime, &huge), Err(Error::Limit { limit: 0, .. })));
        for wrong in [
            PagedCacheDesc { page_count: 0, ..shape },
            PagedCacheDesc { page_len: 0, ..shape },
            PagedCacheDesc { kv_heads: 0, ..shape },
            PagedCacheDesc { head_dim: 0, ..shape },
            PagedCacheDesc { v_head_dim: Some(0), ..shape },
        ] {
            assert!(matches!(PagedCache::new(&runtime, &wrong), Err(Error::Shape { .. })), "{wrong:?}");
        }
        for wrong in [desc(1, 16, 2049, 8), desc(1, 16, 1, 577), PagedCacheDesc { v_head_dim: Some(513), ..shape }] {
            assert!(matches!(PagedCache::new(&runtime, &wrong), Err(Error::Limit { .. })), "{wrong:?}");
        }
    }
}
