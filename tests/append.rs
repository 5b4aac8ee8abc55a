//! Appending on every adapter: types, orders, pairings, scalings, far positions; nothing else is touched; refusals.

mod common;

use common::*;
use wgpu_attention::*;

const ORDERS: [PageOrder; 2] = [PageOrder::Hnd, PageOrder::Nhd];

fn desc(heads: u32, kv_heads: u32, head_dim: u32) -> AppendDesc {
    AppendDesc {
        heads,
        kv_heads,
        head_dim,
        v_head_dim: None,
        dtype: DType::F32,
        cache_dtype: DType::F32,
        rope: Some(Rope::default()),
    }
}

fn cache_desc(desc: &AppendDesc, page_count: u32, page_len: u32, order: PageOrder) -> PagedCacheDesc {
    let AppendDesc { kv_heads, head_dim, v_head_dim, cache_dtype: dtype, .. } = *desc;
    PagedCacheDesc { page_count, page_len, kv_heads, head_dim, v_head_dim, dtype, order }
}

fn submit(runtime: &Runtime, record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>) {
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    record(&mut encoder).unwrap();
    runtime.queue().submit([encoder.finish()]);
}

/// Random bits, NaNs among them.
fn noise(size: u64, data: &mut Data) -> Vec<u8> {
    (0..size.next_multiple_of(16)).map(|_| data.below(256) as u8).collect()
}

const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC);

/// New rows of one tensor, its place in a buffer of noise, and what they become.
struct Target {
    heads: u32,
    dim: u32,
    layout: Layout,
    dtype: DType,
    buffer: wgpu::Buffer,
    before: Vec<u8>,
}

impl Target {
    fn new(
        runtime: &Runtime,
        [heads, dim]: [u32; 2],
        layout: Layout,
        dtype: DType,
        size: u64,
        data: &mut Data,
    ) -> Self {
        let before = noise(size, data);
        let buffer = runtime.upload("target", &before, STORAGE).unwrap();
        Target { heads, dim, layout, dtype, buffer, before }
    }

    /// Elements at the places of tokens are as expected, all other bytes as before.
    fn check(
        &self,
        runtime: &Runtime,
        new: &[f32],
        from: DType,
        rope: Option<&Rope>,
        places: &[(usize, u64, u32)], // row, offset of head 0, position
        what: &str,
    ) {
        let got = block(runtime.read(&self.buffer, self.before.len() as u64)).unwrap();
        let mut untouched = vec![true; got.len()];
        let size = self.dtype.size() as usize;
        let turned = rope.map_or(0, |rope| rope.dim_of(self.dim).unwrap()) as usize;
        for (row, place, position) in places {
            for head in 0..self.heads as usize {
                let dim = self.dim as usize;
                let values = &new[(row * self.heads as usize + head) * dim..][..dim];
                let want = match rope {
                    Some(rope) => rope.apply(values, *position).unwrap(),
                    None => values.iter().map(|x| f64::from(*x)).collect(),
                };
                let largest = values.iter().fold(0f64, |max, x| max.max(f64::from(x.abs())));
                let first = (*place as usize + head * self.layout.head as usize) * size;
                let bytes = &got[first..][..dim * size];
                untouched[first..][..dim * size].fill(false);
                for (d, want) in want.into_iter().enumerate() {
                    let bytes = &bytes[d * size..][..size];
                    let value = f64::from(self.dtype.decode(bytes, 1)[0]);
                    if d >= turned && from == self.dtype {
                        let exact = &self.dtype.encode(&[values[d]])[..size];
                        assert_eq!(bytes, exact, "{what}: row {row}, head {head}, dim {d}");
                        continue;
                    }
                    let rounding = match self.dtype {
                        DType::F32 => 0.0,
                        DType::F16 => (want.abs() * 2f64.powi(-11)).max(2f64.powi(-25)),
                        DType::Bf16 => want.abs() * 2f64.powi(-8),
                    };
                    // The sum of two products with cosines and sines that are off by 2·10⁻⁷, in f32.
                    let arithmetic = if d < turned { 1.5e-6 * largest } else { 0.0 };
                    let allowed = 1.001 * rounding + arithmetic;
                    assert!(
                        (value - want).abs() <= allowed,
                        "{what}: row {row}, head {head}, dim {d}: {value}, {want}"
                    );
                }
            }
        }
        let same = |i: usize| !untouched[i] || got[i] == self.before[i];
        assert_eq!((0..got.len()).find(|i| !same(*i)), None, "{what}: a byte that is no token's has changed");
    }
}

/// Appends `tokens` to pages of noise and checks Q, K and V, and every byte around them.
fn check(name: &str, runtime: &Runtime, desc: &AppendDesc, order: PageOrder, page_len: u32, positions: &[u32]) {
    let what = format!("{name}: {desc:?}, {order:?}, pages of {page_len}");
    let data = &mut Data::new(7 + u64::from(page_len));
    // Three sequences in pages that are out of order; paddings between the tokens; the first token is not first.
    let counts: [u32; 3] = [5, 1, 7];
    let pages_of = |tokens: u32| tokens.div_ceil(page_len);
    let mut order_of_pages: Vec<u32> = (0..counts.iter().map(|n| pages_of(*n)).sum::<u32>() + 1).rev().collect();
    order_of_pages.swap(0, 1);
    let offsets: Vec<u32> = std::iter::once(0)
        .chain(counts.iter().scan(0, |end, n| {
            *end += pages_of(*n);
            Some(*end)
        }))
        .collect();
    let table = PageTable { page_len, offsets: &offsets, pages: &order_of_pages[..*offsets.last().unwrap() as usize] };
    let place = |sequence, index, position| Some(NewToken { sequence, index, position });
    let mut tokens = vec![None, place(2, 3, positions[0]), place(2, 4, positions[1]), place(0, 4, positions[2]), None];
    tokens.extend([place(1, 0, positions[3]), place(2, 6, positions[4]), place(0, 0, positions[5])]);

    let cached = cache_desc(desc, order_of_pages.len() as u32, page_len, order);
    let (q_dims, k_dims, v_dims) =
        ([desc.heads, desc.head_dim], [desc.kv_heads, desc.head_dim], [desc.kv_heads, desc.v_dim()]);
    let pool = |layout: Layout| u64::from(cached.page_count) * layout.batch * desc.cache_dtype.size();
    let (k_layout, v_layout) = (cached.k_layout(), cached.v_layout());
    let k_target = Target::new(runtime, k_dims, k_layout, desc.cache_dtype, pool(k_layout), data);
    let v_target = Target::new(runtime, v_dims, v_layout, desc.cache_dtype, pool(v_layout), data);
    let q_out_layout = Layout::bshd(0, desc.heads, desc.head_dim);
    let q_size = tokens.len() as u64 * q_out_layout.seq * desc.dtype.size();
    let q_target = Target::new(runtime, q_dims, q_out_layout, desc.dtype, q_size, data);

    // The new rows lie in wider ones, as after one product for all three.
    let wide = u64::from((desc.heads + desc.kv_heads) * desc.head_dim + desc.kv_heads * desc.v_dim());
    let row = |first: u64, dim: u32| Layout { offset: first, batch: 0, seq: wide, head: dim.into() };
    let k_first = u64::from(desc.heads * desc.head_dim);
    let v_first = k_first + u64::from(desc.kv_heads * desc.head_dim);
    let values = data.tensor(tokens.len() * wide as usize, desc.dtype);
    let new = runtime.upload("new", &desc.dtype.encode(&values), STORAGE).unwrap();
    let take = |first: u64, [heads, dim]: [u32; 2]| -> Vec<f32> {
        values.chunks(wide as usize).flat_map(|row| row[first as usize..][..(heads * dim) as usize].to_vec()).collect()
    };

    let append = Append::new(runtime, desc).unwrap();
    let batch = AppendBatch {
        q_layout: row(0, desc.head_dim),
        k_layout: row(k_first, desc.head_dim),
        v_layout: row(v_first, desc.v_dim()),
        k_cache_layout: k_layout,
        v_cache_layout: v_layout,
        ..AppendBatch::new(desc, &tokens, table)
    };
    let plan = append.plan(&batch).unwrap();
    let io = AppendIo {
        q: (desc.heads > 0).then(|| ((&new).into(), (&q_target.buffer).into())),
        k: (&new).into(),
        v: (&new).into(),
        k_cache: (&k_target.buffer).into(),
        v_cache: (&v_target.buffer).into(),
    };
    submit(runtime, |encoder| append.record(encoder, &plan, &io));

    let rope = desc.rope.as_ref();
    let places = |layout: &Layout| -> Vec<(usize, u64, u32)> {
        let place = |(row, token): (usize, &Option<NewToken>)| {
            let NewToken { sequence, index, position } = (*token)?;
            let page = table.of(sequence as usize)[(index / page_len) as usize];
            Some((row, u64::from(page) * layout.batch + u64::from(index % page_len) * layout.seq, position))
        };
        tokens.iter().enumerate().filter_map(place).collect()
    };
    let same_rows: Vec<_> =
        places(&k_layout).iter().map(|(row, _, position)| (*row, *row as u64 * q_out_layout.seq, *position)).collect();
    let places_of_q = if desc.heads > 0 { same_rows } else { Vec::new() };
    q_target.check(runtime, &take(0, q_dims), desc.dtype, rope, &places_of_q, &format!("{what}: Q"));
    k_target.check(runtime, &take(k_first, k_dims), desc.dtype, rope, &places(&k_layout), &format!("{what}: K"));
    v_target.check(runtime, &take(v_first, v_dims), desc.dtype, None, &places(&v_layout), &format!("{what}: V"));
}

#[test]
fn every_type_order_and_size() {
    for (name, runtime) in runtimes() {
        let mut case = 0;
        for dtype in DType::ALL {
            for cache_dtype in DType::ALL {
                for (heads, kv_heads, head_dim, v_head_dim) in
                    [(3, 1, 5, None), (2, 2, 64, Some(32)), (0, 3, 2, Some(7)), (4, 2, 80, None), (1, 1, 128, None)]
                {
                    case += 1;
                    let rope = match case % 4 {
                        0 => None,
                        _ if head_dim == 5 => Some(Rope { dim: Some([2, 4][case % 2]), ..Rope::default() }),
                        1 => Some(Rope { pairs: RopePairs::Interleaved, ..Rope::default() }),
                        2 => Some(Rope { dim: Some(head_dim / 4 * 2), ..Rope::default() }),
                        _ => Some(Rope::default()),
                    };
                    let desc = AppendDesc { dtype, cache_dtype, v_head_dim, rope, ..desc(heads, kv_heads, head_dim) };
                    let positions = [3, 4, 4, 0, 6, 1000];
                    check(name, runtime, &desc, ORDERS[case / 2 % 2], [1, 3, 16][case % 3], &positions);
                }
            }
        }
    }
}

#[test]
fn every_pairing_and_scaling_at_far_positions() {
    let scalings = [
        RopeScaling::None,
        RopeScaling::Linear { factor: 4.0 },
        RopeScaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 },
        RopeScaling::Yarn {
            factor: 40.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096,
            attention_factor: None,
            truncate: true,
        },
        RopeScaling::Frequencies { radians: (0..32).map(|i| 0.1 * f64::from(i - 16)).collect(), attention_factor: 1.5 },
    ];
    for (name, runtime) in runtimes() {
        for scaling in &scalings {
            for pairs in [RopePairs::HalfSplit, RopePairs::Interleaved] {
                for dim in [64, 70] {
                    let rope = Rope { dim: Some(64), theta: 500_000.0, pairs, scaling: scaling.clone() };
                    let desc = AppendDesc { rope: Some(rope), ..desc(1, 1, dim) };
                    let far = [131_072, 1 << 20, i32::MAX as u32, 127, 4096, i32::MAX as u32 - 12_345];
                    check(name, runtime, &desc, PageOrder::Hnd, 4, &far);
                }
            }
        }
    }
}

/// vllm 39444: padding writes nothing, page 0 least of all. No tokens at all, and only padding.
#[test]
fn case_18_padding_is_skipped() {
    for (name, runtime) in runtimes() {
        let desc = desc(1, 1, 4);
        let cache = PagedCache::new(runtime, &cache_desc(&desc, 2, 2, PageOrder::Hnd)).unwrap();
        let append = Append::new(runtime, &desc).unwrap();
        let rows = runtime.upload("rows", &[0xff; 64], STORAGE).unwrap();
        let q_out = runtime.upload("q", &[7; 64], STORAGE).unwrap();
        for tokens in [&[][..], &[None, None]] {
            let table = PageTable { page_len: 2, offsets: &[0, 1], pages: &[0] };
            let plan = append.plan(&AppendBatch::on(&cache, &desc, tokens, table).unwrap()).unwrap();
            let (k, v) = ((&rows).into(), (&rows).into());
            let io = AppendIo { q: Some((k, (&q_out).into())), k, v, k_cache: cache.k(), v_cache: cache.v() };
            submit(runtime, |encoder| append.record(encoder, &plan, &io));
            for buffer in [cache.k().buffer, cache.v().buffer] {
                assert_eq!(block(runtime.read(buffer, 64)).unwrap(), [0; 64], "{name}");
            }
            assert_eq!(block(runtime.read(&q_out, 64)).unwrap(), [7; 64], "{name}");
        }
    }
}

/// One new row of each token, V without K's company: `v` in `dtype`, dims of one head, as the cache of `cache_dtype` has it.
fn converted(runtime: &Runtime, v: &[u8], tokens: u32, dim: u32, dtype: DType, cache_dtype: DType) -> Vec<u8> {
    let desc = AppendDesc { v_head_dim: Some(dim), dtype, cache_dtype, rope: None, ..desc(0, 1, 1) };
    let cache = PagedCache::new(runtime, &cache_desc(&desc, 1, tokens, PageOrder::Nhd)).unwrap();
    let table = PageTable { page_len: tokens, offsets: &[0, 1], pages: &[0] };
    let tokens = NewToken::last(Lengths::Uniform { batch: 1, len: tokens }, &[tokens]).unwrap();
    let append = Append::new(runtime, &desc).unwrap();
    let plan = append.plan(&AppendBatch::on(&cache, &desc, &tokens, table).unwrap()).unwrap();
    let k = runtime.upload("k", &vec![0; 4 * tokens.len()], STORAGE).unwrap();
    let v = runtime.upload("v", v, STORAGE).unwrap();
    let io = AppendIo { q: None, k: (&k).into(), v: (&v).into(), k_cache: cache.k(), v_cache: cache.v() };
    submit(runtime, |encoder| append.record(encoder, &plan, &io));
    let elements = tokens.len() as u64 * u64::from(dim);
    block(runtime.read(cache.v().buffer, elements * cache_dtype.size())).unwrap()
}

/// Every f16 and bf16 there is, as f32 and back; every number halfway between two of them, and the next ones on both sides.
#[test]
fn types_are_converted_to_the_nearest_even() {
    for (name, runtime) in runtimes() {
        for (dtype, dim) in [(DType::F16, 64), (DType::F16, 31), (DType::Bf16, 64), (DType::Bf16, 31)] {
            // As many tokens as make whole rows of `dim` from all that there are.
            let padded = |mut values: Vec<u8>, size: usize| {
                let row = dim as usize * size;
                values.resize(values.len().next_multiple_of(row), 0);
                let tokens = (values.len() / row) as u32;
                (values, tokens)
            };
            let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let (halves, tokens) = padded(all, 2);
            let exact = dtype.decode(&halves, 1 << 16);
            let got = converted(runtime, &halves, tokens, dim, dtype, DType::F32);
            for (i, (got, want)) in DType::F32.decode(&got, 1 << 16).iter().zip(&exact).enumerate() {
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{name}: {dtype} {i:#x}: {got:e}, {want:e}");
            }

            let mut values: Vec<f32> = Vec::new();
            for magnitude in 0..0x7f80u16 {
                let of = |bits: u16| dtype.decode(&bits.to_le_bytes(), 1)[0];
                let (low, high) = (of(magnitude), of(magnitude + 1));
                if !low.is_finite() {
                    break;
                }
                // Above the largest, half of its distance to the one that would be next.
                let half = match high.is_finite() {
                    true => ((f64::from(low) + f64::from(high)) / 2.0) as f32,
                    false => low + (low - of(magnitude - 1)) / 2.0,
                };
                values.extend([
                    low,
                    half,
                    f32::from_bits(half.to_bits() + 1),
                    f32::from_bits(half.to_bits().max(1) - 1),
                ]);
            }
            values.extend([f32::MAX, f32::INFINITY, 1e-40, f32::NAN]);
            values.extend(values.clone().iter().map(|x| -x));
            let (bytes, tokens) = padded(bytemuck::cast_slice(&values).to_vec(), 4);
            let got = converted(runtime, &bytes, tokens, dim, DType::F32, dtype);
            let want = dtype.encode(&values);
            for (i, value) in values.iter().enumerate() {
                let bits = |bytes: &[u8]| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
                let nan = |bytes: &[u8]| dtype.decode(&bytes[2 * i..][..2], 1)[0].is_nan();
                let same = bits(&got) == bits(&want) || nan(&got) && nan(&want);
                assert!(same, "{name}: {value:e} to {dtype}: {:#x}, {:#x}", bits(&got), bits(&want));
            }
        }
    }
}

/// So many rows that a team moves several, tokens beginning inside; rows of more units than a workgroup has lanes.
#[test]
fn many_heads_and_long_heads() {
    for (name, runtime) in runtimes() {
        for (count, heads, dim, first) in [(24_000u32, 3, 4, 0), (500, 2, 575, 1), (40, 5, 576, 0)] {
            let rope = Rope { dim: Some(dim / 2 * 2), ..Rope::default() };
            let desc = AppendDesc {
                v_head_dim: Some(1),
                cache_dtype: DType::F16,
                rope: Some(rope.clone()),
                ..desc(0, heads, dim)
            };
            let tokens = NewToken::last(Lengths::Uniform { batch: 1, len: count }, &[count]).unwrap();
            let table = PageTable { page_len: count, offsets: &[0, 1], pages: &[0] };
            let layout = Layout { offset: first, batch: 0, ..Layout::bshd(0, heads, dim) };
            let batch = AppendBatch {
                k_layout: layout,
                k_cache_layout: layout,
                v_cache_layout: Layout::bshd(count, heads, 1),
                ..AppendBatch::new(&desc, &tokens, table)
            };
            let data = &mut Data::new(5);
            let elements = first + u64::from(count * heads * dim);
            let values = data.tensor(elements as usize, DType::F32);
            let new = runtime.upload("new", bytemuck::cast_slice(&values), STORAGE).unwrap();
            let target = Target::new(runtime, [heads, dim], layout, DType::F16, elements * 2, data);
            let v_cache = runtime.buffer("v", u64::from(2 * count * heads), STORAGE).unwrap();
            let append = Append::new(runtime, &desc).unwrap();
            let plan = append.plan(&batch).unwrap();
            let io = AppendIo {
                q: None,
                k: (&new).into(),
                v: (&new).into(),
                k_cache: (&target.buffer).into(),
                v_cache: (&v_cache).into(),
            };
            submit(runtime, |encoder| append.record(encoder, &plan, &io));
            let places: Vec<_> = (0..count).map(|i| (i as usize, first + u64::from(i) * layout.seq, i)).collect();
            target.check(
                runtime,
                &values[first as usize..],
                DType::F32,
                Some(&rope),
                &places,
                &format!("{name}: {heads} heads of {dim}"),
            );
        }
    }
}

/// K and V beside each other in one buffer, as some caches have them (vllm 50427); never on the same elements.
#[test]
fn case_53_k_and_v_in_one_buffer() {
    for (name, runtime) in runtimes() {
        for (dtype, dim) in [(DType::F32, 8), (DType::F16, 8), (DType::F16, 5)] {
            let desc = AppendDesc { dtype, cache_dtype: dtype, ..desc(1, 2, dim) };
            let desc = AppendDesc { rope: (dim == 8).then(Rope::default), ..desc };
            let pages = [2, 0];
            let table = PageTable { page_len: 3, offsets: &[0, 2], pages: &pages };
            let tokens = NewToken::last(Lengths::Uniform { batch: 1, len: 4 }, &[5]).unwrap();
            // [page, slot, head, (K, V), dim]
            let (pair, dim64) = (2 * u64::from(dim), u64::from(dim));
            let k_cache_layout = Layout { offset: 0, batch: 3 * 2 * pair, seq: 2 * pair, head: pair };
            let v_cache_layout = Layout { offset: dim64, ..k_cache_layout };
            let batch = AppendBatch { k_cache_layout, v_cache_layout, ..AppendBatch::new(&desc, &tokens, table) };
            let data = &mut Data::new(53);
            let values = data.tensor(4 * 2 * dim as usize, dtype);
            let new = runtime.upload("new", &dtype.encode(&values), STORAGE).unwrap();
            let size = 3 * k_cache_layout.batch * dtype.size();
            let both = Target::new(runtime, [2, 2 * dim], k_cache_layout, dtype, size, data);
            let q_out = runtime.buffer("q", 1024, STORAGE).unwrap();
            let append = Append::new(runtime, &desc).unwrap();
            let plan = append.plan(&batch).unwrap();
            let view: View = (&both.buffer).into();
            let (k, q_out) = ((&new).into(), (&q_out).into());
            let io = AppendIo { q: Some((k, q_out)), k, v: k, k_cache: view, v_cache: view };
            submit(runtime, |encoder| append.record(encoder, &plan, &io));
            let got = dtype.decode(&block(runtime.read(&both.buffer, both.before.len() as u64)).unwrap(), usize::MAX);
            let mut seen = 0;
            for (row, index) in (1..5u32).enumerate() {
                for head in 0..2usize {
                    let at = (u64::from(pages[index as usize / 3]) * k_cache_layout.batch
                        + u64::from(index % 3) * k_cache_layout.seq) as usize
                        + head * pair as usize;
                    let new = &values[(2 * row + head) * dim as usize..][..dim as usize];
                    assert_eq!(&got[at + dim as usize..][..dim as usize], new, "{name}: V");
                    let want = match &desc.rope {
                        Some(rope) => rope.apply(new, index).unwrap(),
                        None => new.iter().map(|x| f64::from(*x)).collect(),
                    };
                    let tolerance = if dtype == DType::F32 { 4e-6 } else { 4e-3 };
                    compare(&got[at..][..dim as usize], &want, tolerance, &format!("{name}: K"));
                    seen += 2 * dim as usize;
                }
            }
            // All the rest is as before.
            let before = dtype.decode(&both.before, usize::MAX);
            let changed = got.iter().zip(&before).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert!(changed <= seen, "{name}: {changed} elements have changed, {seen} are new");

            let refused = |batch: &AppendBatch, io: &AppendIo| {
                let plan = append.plan(batch).unwrap();
                let mut encoder = runtime.device().create_command_encoder(&Default::default());
                append.record(&mut encoder, &plan, io).unwrap_err().to_string()
            };
            let message = "v_cache: expected elements apart from those of k_cache, got some of the same";
            let same = AppendBatch { v_cache_layout: k_cache_layout, ..batch };
            assert_eq!(refused(&same, &io), message, "{name}");
            let nearly = AppendBatch { v_cache_layout: Layout { offset: dim64 - 1, ..k_cache_layout }, ..batch };
            assert_eq!(refused(&nearly, &io), message, "{name}");
            let error = refused(&batch, &AppendIo { q: Some((k, view)), ..io });
            assert!(error.contains("apart from those of q_out"), "{name}: {error}");
        }
    }
}

/// In a pass of the caller, a plan for layers with other frequencies, dropped before the commands are submitted; later plans
/// take over its buffers only once the device is done with them.
#[test]
fn plans_in_flight_keep_their_buffers() {
    for (name, runtime) in runtimes() {
        let with = |theta| AppendDesc { rope: Some(Rope { theta, ..Rope::default() }), ..desc(0, 1, 4) };
        let appends = [1e4, 1e6].map(|theta| Append::new(runtime, &with(theta)).unwrap());
        let values = Data::new(9).tensor(4, DType::F32);
        let new = runtime.upload("new", bytemuck::cast_slice(&values), STORAGE).unwrap();
        let mut wanted = Vec::new();
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        for page in 0..40u32 {
            let cache = PagedCache::new(runtime, &cache_desc(&with(1e4), 40, 1, PageOrder::Hnd)).unwrap();
            let pages = [page];
            let table = PageTable { page_len: 1, offsets: &[0, 1], pages: &pages };
            let tokens = [Some(NewToken { sequence: 0, index: 0, position: 100 + page })];
            let plan = appends[0].plan(&AppendBatch::on(&cache, &with(1e4), &tokens, table).unwrap()).unwrap();
            let (k, v) = ((&new).into(), (&new).into());
            let io = AppendIo { q: None, k, v, k_cache: cache.k(), v_cache: cache.v() };
            let append = &appends[page as usize % 2];
            let mut pass = encoder.begin_compute_pass(&Default::default());
            append.record_in(&mut pass, &plan, &io).unwrap();
            drop(pass);
            wanted.push((cache, append.desc().rope.clone().unwrap().apply(&values, 100 + page).unwrap()));
            if page % 10 == 9 {
                let full =
                    std::mem::replace(&mut encoder, runtime.device().create_command_encoder(&Default::default()));
                runtime.queue().submit([full.finish()]);
            }
        }
        for (page, (cache, want)) in wanted.iter().enumerate() {
            let all = DType::F32.decode(&block(runtime.read(cache.k().buffer, 640)).unwrap(), 160);
            compare(&all[4 * page..][..4], want, 4e-6, &format!("{name}: page {page}"));
            let others = all.iter().enumerate().filter(|(i, x)| i / 4 != page && **x != 0.0).count();
            assert_eq!(others, 0, "{name}: page {page}");
        }
    }
}

/// vllm 53982 and its kind.
#[test]
fn case_17_bad_tokens_are_refused() {
    let (name, runtime) = &runtimes()[0];
    let desc = desc(0, 1, 4);
    let cache = PagedCache::new(runtime, &cache_desc(&desc, 4, 4, PageOrder::Hnd)).unwrap();
    let append = Append::new(runtime, &desc).unwrap();
    let table = PageTable { page_len: 4, offsets: &[0, 2, 3], pages: &[1, 2, 3] };
    let token = |sequence, index, position| Some(NewToken { sequence, index, position });
    for (tokens, message) in [
        (vec![None, token(1, 4, 0)], "token 1: expected an index below 4, the slots of sequence 1's pages, got 4"),
        (
            vec![token(0, u32::MAX, 0)],
            "token 0: expected an index below 8, the slots of sequence 0's pages, got 4294967295",
        ),
        (vec![token(2, 0, 0)], "token 0: expected a sequence below the table's 2, got 2"),
        (
            vec![token(0, 5, 0), token(0, 6, 1), token(1, 0, 0), token(0, 6, 6)],
            "tokens: expected one token for each place, got two for slot 2 of page or sequence 2",
        ),
    ] {
        let batch = AppendBatch::on(&cache, &desc, &tokens, table).unwrap();
        assert_eq!(append.plan(&batch).unwrap_err().to_string(), message, "{name}");
    }
    let far = [token(0, 0, 1 << 31)];
    let error = append.plan(&AppendBatch::on(&cache, &desc, &far, table).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");

    // A page that the cache does not have, by the cache and by the buffer.
    let beyond = PageTable { pages: &[1, 2, 4], ..table };
    let tokens = [token(1, 0, 0)];
    let error = AppendBatch::on(&cache, &desc, &tokens, beyond).unwrap_err();
    assert_eq!(error.to_string(), "page: expected less than the cache's 4, got 4");
    let plan = append.plan(&AppendBatch::new(&desc, &tokens, beyond)).unwrap();
    let rows = runtime.upload("rows", &[0; 64], STORAGE).unwrap();
    let (k, v) = ((&rows).into(), (&rows).into());
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    let io = AppendIo { q: None, k, v, k_cache: cache.k(), v_cache: cache.v() };
    let error = append.record(&mut encoder, &plan, &io).unwrap_err();
    assert!(matches!(&error, Error::Shape { what, .. } if what == "k_cache"), "{error}");

    // Buffers.
    let tokens = [token(0, 0, 0)];
    let plan = append.plan(&AppendBatch::on(&cache, &desc, &tokens, table).unwrap()).unwrap();
    for (io, message) in [
        (AppendIo { q: Some((k, v)), ..io }, "q: expected none, as the descriptor says, got buffers"),
        (
            AppendIo { k: cache.v(), ..io },
            "k: expected a buffer other than the outputs' (WebGPU demands it), got the same buffer",
        ),
    ] {
        assert_eq!(append.record(&mut encoder, &plan, &io).unwrap_err().to_string(), message, "{name}");
    }
    let same = Append::new(runtime, &AppendDesc { v_head_dim: Some(4), ..desc.clone() }).unwrap();
    same.record(&mut encoder, &plan, &io).unwrap();
    let other = Append::new(runtime, &AppendDesc { rope: None, ..desc.clone() }).unwrap();
    let error = other.record(&mut encoder, &plan, &io).unwrap_err().to_string();
    assert!(error.starts_with("plan: expected one of the same heads"), "{error}");

    // Rows of the cache that overlap.
    let overlapping = AppendBatch {
        k_cache_layout: Layout { seq: 3, ..Layout::bhsd(4, 1, 4) },
        ..AppendBatch::new(&desc, &tokens, table)
    };
    let error = append.plan(&overlapping).unwrap_err().to_string();
    assert!(error.contains("k_cache: expected strides"), "{error}");
    for bad in [
        AppendDesc { kv_heads: 0, ..desc.clone() },
        AppendDesc { head_dim: 577, ..desc.clone() },
        AppendDesc { rope: Some(Rope { dim: Some(6), ..Rope::default() }), ..desc.clone() },
    ] {
        assert!(Append::new(runtime, &bad).is_err(), "{bad:?}");
    }
}

/// More runs than one dimension of a dispatch carries.
#[test]
fn many_tokens_of_many_pages() {
    for (name, runtime) in runtimes() {
        let count = 70_000u32;
        let desc = AppendDesc { rope: None, ..desc(0, 1, 1) };
        let cache = PagedCache::new(runtime, &cache_desc(&desc, count, 1, PageOrder::Hnd)).unwrap();
        let pages: Vec<u32> = (0..count).rev().collect();
        let table = PageTable { page_len: 1, offsets: &[0, count], pages: &pages };
        let tokens = NewToken::last(Lengths::Uniform { batch: 1, len: count }, &[count]).unwrap();
        let append = Append::new(runtime, &desc).unwrap();
        let plan = append.plan(&AppendBatch::on(&cache, &desc, &tokens, table).unwrap()).unwrap();
        let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
        let rows = runtime.upload("rows", bytemuck::cast_slice(&values), STORAGE).unwrap();
        let (k, v) = ((&rows).into(), (&rows).into());
        let io = AppendIo { q: None, k, v, k_cache: cache.k(), v_cache: cache.v() };
        submit(runtime, |encoder| append.record(encoder, &plan, &io));
        for view in [cache.k(), cache.v()] {
            let got: Vec<f32> =
                bytemuck::pod_collect_to_vec(&block(runtime.read(view.buffer, 4 * u64::from(count))).unwrap());
            assert!(got.iter().rev().eq(&values), "{name}");
        }
    }
}

/// Dims that are turned and dims that are copied make one row: rows that overlap only as a whole are refused too.
#[test]
fn overlapping_rows_of_two_parts_are_refused() {
    let (name, runtime) = &runtimes()[0];
    let desc = AppendDesc { rope: Some(Rope { dim: Some(4), ..Rope::default() }), ..desc(0, 2, 8) };
    let table = PageTable { page_len: 4, offsets: &[0, 1], pages: &[0] };
    let tokens = [Some(NewToken { sequence: 0, index: 0, position: 0 })];
    let batch = AppendBatch::new(&desc, &tokens, table);
    let append = Append::new(runtime, &desc).unwrap();
    append.plan(&batch).unwrap();
    let k_cache_layout = Layout { offset: 0, batch: 64, seq: 16, head: 4 };
    let error = append.plan(&AppendBatch { k_cache_layout, ..batch }).unwrap_err().to_string();
    assert!(error.contains("(here at least 8), got 4"), "{name}: {error}");
}

#[test]
fn too_many_rows_are_refused() {
    let error = NewToken::last(Lengths::Padded { max_len: u32::MAX, lens: &[0] }, &[0]).unwrap_err();
    assert!(matches!(error, Error::Limit { value, .. } if value == u64::from(u32::MAX)), "{error}");
}
