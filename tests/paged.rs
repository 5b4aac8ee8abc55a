//! Keys in pages: every row, page length, order and option against the oracle on the same keys laid out densely. Whatever
//! no sequence owns is NaN or infinite.

mod common;

use common::*;
use wgpu_attention::ops::attention::{self, alibi_slopes};
use wgpu_attention::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// `[page, kv_head, slot, dim]`
    Hnd,
    /// `[page, slot, kv_head, dim]`
    Nhd,
}

impl Order {
    fn layout(self, page_len: u32, heads: u32, dim: u32) -> Layout {
        match self {
            Order::Hnd => Layout::bhsd(page_len, heads, dim),
            Order::Nhd => Layout::bshd(page_len, heads, dim),
        }
    }
}

/// Sequences with their keys dense, one after the other, and in pages of a pool.
struct Scene {
    desc: AttentionDesc,
    page_len: u32,
    order: Order,
    q_offsets: Vec<u32>,
    kv_offsets: Vec<u32>,
    kv_lens: Vec<u32>,
    table_offsets: Vec<u32>,
    pages: Vec<u32>,
    dense: Tensors,
    paged: Tensors,
}

fn offsets_of(lens: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut offsets = vec![0];
    for len in lens {
        offsets.push(offsets[offsets.len() - 1] + len);
    }
    offsets
}

/// Never a page of its own: see [`Scene::new`].
fn alone(b: usize, _page: u32) -> usize {
    b
}

impl Scene {
    /// Sequences of (rows, keys). Page `p` of sequence `b` is that of sequence `owner(b, p)`, which stands before it.
    fn new(
        desc: &AttentionDesc,
        page_len: u32,
        order: Order,
        lens: &[(u32, u32)],
        owner: impl Fn(usize, u32) -> usize,
        seed: u64,
    ) -> Scene {
        let mut data = Data::new(seed);
        let q_offsets = offsets_of(lens.iter().map(|(q, _)| *q));
        let kv_offsets = offsets_of(lens.iter().map(|(_, kv)| *kv));
        let table_offsets = offsets_of(lens.iter().map(|(_, kv)| kv.div_ceil(page_len)));
        let plain = Batch::new(desc, Lengths::Ragged { offsets: &q_offsets }, Lengths::Ragged { offsets: &kv_offsets });
        let mut dense = Tensors::random(desc, &plain, &mut data);
        let own = table_offsets[lens.len()];
        // As many pages again that nobody has, and all in no order.
        let mut ids: Vec<u32> = (0..2 * own).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, data.below(i as u32 + 1) as usize);
        }
        let mut scene = Scene {
            desc: desc.clone(),
            page_len,
            order,
            pages: Vec::new(),
            kv_lens: lens.iter().map(|(_, kv)| *kv).collect(),
            paged: Tensors::default(),
            q_offsets,
            kv_offsets,
            table_offsets,
            dense: Tensors::default(),
        };
        let (row, v_row) = (desc.kv_heads * desc.head_dim, desc.kv_heads * desc.v_dim());
        for (b, (_, kv_len)) in lens.iter().enumerate() {
            for page in 0..kv_len.div_ceil(page_len) {
                let of = owner(b, page);
                assert!(of <= b);
                let id =
                    if of == b { ids.pop().unwrap() } else { scene.pages[(scene.table_offsets[of] + page) as usize] };
                scene.pages.push(id);
                let keys = page * page_len..(*kv_len).min((page + 1) * page_len);
                assert!(keys.end <= lens[of].1, "a shared page's tokens are there in the owner");
                for key in keys {
                    let (from, to) = (scene.kv_offsets[of] + key, scene.kv_offsets[b] + key);
                    dense.k.copy_within((from * row) as usize..((from + 1) * row) as usize, (to * row) as usize);
                    dense.v.copy_within((from * v_row) as usize..((from + 1) * v_row) as usize, (to * v_row) as usize);
                }
            }
        }
        scene.dense = dense;
        scene.fill(2 * own);
        scene
    }

    /// The pool, from the dense tensors and the table.
    fn fill(&mut self, pages: u32) {
        let poisoned = |dim: u32| -> Vec<f32> {
            let poison = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            let len = pages * self.page_len * self.desc.kv_heads * dim;
            (0..len as usize).map(|i| poison[i % 3]).collect()
        };
        let (dim, v_dim) = (self.desc.head_dim, self.desc.v_dim());
        let (mut k, mut v) = (poisoned(dim), poisoned(v_dim));
        for (b, kv_len) in self.kv_lens.iter().enumerate() {
            for key in 0..*kv_len {
                let page = self.pages[(self.table_offsets[b] + key / self.page_len) as usize];
                for head in 0..self.desc.kv_heads {
                    for (pool, dense, dim) in [(&mut k, &self.dense.k, dim), (&mut v, &self.dense.v, v_dim)] {
                        let from = ((self.kv_offsets[b] + key) * self.desc.kv_heads + head) * dim;
                        let layout = self.order.layout(self.page_len, self.desc.kv_heads, dim);
                        let slot = u64::from(key % self.page_len);
                        let to = u64::from(page) * layout.batch + slot * layout.seq + u64::from(head) * layout.head;
                        pool[to as usize..][..dim as usize].copy_from_slice(&dense[from as usize..][..dim as usize]);
                    }
                }
            }
        }
        self.paged = Tensors { q: self.dense.q.clone(), k, v, ..self.dense.clone() };
    }

    /// The same sequences in other places of the pool.
    fn permuted(&self, seed: u64) -> Scene {
        let mut data = Data::new(seed);
        let count = (self.paged.k.len() as u32) / (self.page_len * self.desc.kv_heads * self.desc.head_dim);
        let mut to: Vec<u32> = (0..count).collect();
        for i in (1..to.len()).rev() {
            to.swap(i, data.below(i as u32 + 1) as usize);
        }
        let mut scene = Scene {
            pages: self.pages.iter().map(|page| to[*page as usize]).collect(),
            desc: self.desc.clone(),
            q_offsets: self.q_offsets.clone(),
            kv_offsets: self.kv_offsets.clone(),
            kv_lens: self.kv_lens.clone(),
            table_offsets: self.table_offsets.clone(),
            dense: self.dense.clone(),
            paged: Tensors::default(),
            ..*self
        };
        scene.fill(count);
        scene
    }

    fn table(&self) -> PageTable<'_> {
        PageTable { page_len: self.page_len, offsets: &self.table_offsets, pages: &self.pages }
    }

    fn dense_batch(&self) -> Batch<'_> {
        let (q, kv) = (Lengths::Ragged { offsets: &self.q_offsets }, Lengths::Ragged { offsets: &self.kv_offsets });
        Batch::new(&self.desc, q, kv)
    }

    fn batch(&self) -> Batch<'_> {
        let q = Lengths::Ragged { offsets: &self.q_offsets };
        Batch {
            k_layout: self.order.layout(self.page_len, self.desc.kv_heads, self.desc.head_dim),
            v_layout: self.order.layout(self.page_len, self.desc.kv_heads, self.desc.v_dim()),
            cascade: Cascade::Always,
            ..Batch::paged(&self.desc, q, &self.kv_lens, self.table())
        }
    }

    /// The oracle on the dense keys.
    fn expected(&self) -> Expected {
        Expected::of(&self.desc, &self.dense_batch(), &self.dense.input())
    }

    /// Runs on the pages, and compares.
    fn check(&self, name: &str, runtime: &Runtime, what: &str) -> HostOutput {
        let attention = Attention::new(runtime, &self.desc).unwrap_or_else(|error| panic!("{name}: {what}: {error}"));
        let got = block(attention.run(&self.batch(), &self.paged.input()));
        let got = got.unwrap_or_else(|error| panic!("{name}: {what}: {error}"));
        let what = format!("{name}: {:?}: {what}, page_len {}, {:?}", attention.variants(), self.page_len, self.order);
        self.expected().check(&got, self.desc.lse, &what);
        got
    }
}

fn desc(heads: u32, kv_heads: u32, dim: u32) -> AttentionDesc {
    AttentionDesc { heads, kv_heads, head_dim: dim, lse: true, causal: true, ..AttentionDesc::default() }
}

/// Prefills, chunks of prefills, decodes, a sequence without keys and one without rows.
const MIXED: &[(u32, u32)] = &[(3, 70), (1, 1), (0, 9), (1, 300), (5, 0), (33, 33), (2, 17), (1, 129)];

#[test]
fn every_variant_over_pages() {
    for (name, runtime) in runtimes() {
        let mut served = 0;
        for (turn, row) in attention::variants().iter().enumerate() {
            // Three keys a page are never a divisor of a step; 16 always are.
            for (page_len, order) in [(3, Order::Hnd), ([16, 1, 5, 64, 2][turn % 5], Order::Nhd)] {
                let groups = if row.name.ends_with("q8") { 7 } else { 4 };
                let desc =
                    AttentionDesc { variant: Some(row.name.into()), v_head_dim: Some(20), ..desc(2 * groups, 2, 24) };
                if attention::out_reason(runtime, &desc, row).is_some() {
                    continue;
                }
                let scene = Scene::new(&desc, page_len, order, MIXED, alone, turn as u64);
                scene.check(name, runtime, row.name);
                served += 1;
            }
        }
        assert!(served >= 8, "{name}: each form has a portable row, some two");
    }
}

/// One default choice, all page lengths, lengths of sequences around the ends of pages and steps.
#[test]
fn page_lengths() {
    for (name, runtime) in runtimes() {
        for page_len in [1, 2, 7, 16, 31, 128, 256] {
            let edge = page_len;
            let lens = [(1, edge), (1, edge + 1), (1, 2 * edge - 1), (2, 3 * edge), (1, 257), (40, 40 + edge)];
            let order = if page_len % 2 == 0 { Order::Hnd } else { Order::Nhd };
            Scene::new(&desc(4, 2, 16), page_len, order, &lens, alone, page_len.into()).check(name, runtime, "lengths");
        }
    }
}

#[test]
fn types_widths_and_options() {
    for (name, runtime) in runtimes() {
        let types = [DType::F32, DType::F16, DType::Bf16];
        for turn in 0..12usize {
            let heads = [6, 10, 14][turn % 3]; // groups of 3, 5 and 7
            let dim = [24, 9, 10, 20][turn % 4]; // eights, ones, ones, fours
            let desc = AttentionDesc {
                v_head_dim: Some([16, 7, 12][turn % 3]),
                q_dtype: types[turn / 3 % 3],
                kv_dtype: types[turn % 3],
                out_dtype: types[(turn + turn / 3) % 3],
                causal: turn % 2 == 0,
                window: [
                    Window::default(),
                    Window { left: Some(20), right: None },
                    Window { left: Some(5), right: Some(3) },
                    Window { left: None, right: Some(2) },
                ][turn % 4],
                softcap: (turn % 5 == 1).then_some(2.0),
                alibi: (turn % 5 == 2).then(|| alibi_slopes(heads)),
                sinks: (turn % 5 == 3).then(|| (0..heads).map(|h| 1.0 - h as f32 / 3.0).collect()),
                scale: (turn % 5 == 4).then_some(-0.4),
                ..desc(heads, 2, dim)
            };
            let order = [Order::Hnd, Order::Nhd][turn / 2 % 2];
            Scene::new(&desc, 4, order, MIXED, alone, 50 + turn as u64).check(name, runtime, &format!("turn {turn}"));
        }
    }
}

/// The same keys elsewhere give the same bits, and a sequence's own result does not depend on where it lies.
#[test]
fn permuting_pages_changes_no_bit() {
    for (name, runtime) in runtimes() {
        for kv_dtype in [DType::F32, DType::F16] {
            let desc = AttentionDesc { kv_dtype, ..desc(4, 2, 16) };
            let scene = Scene::new(&desc, 3, Order::Hnd, MIXED, alone, 7);
            let first = scene.check(name, runtime, "first");
            for seed in 0..2 {
                let other = scene.permuted(seed);
                assert_ne!(other.pages, scene.pages);
                let got = other.check(name, runtime, "permuted");
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got.out), bits(&first.out), "{name}: {kv_dtype}");
                assert_eq!(bits(&got.lse), bits(&first.lse), "{name}: {kv_dtype}");
            }
        }
    }
}

/// The rows of a prefill, decoded one by one over the same pages.
#[test]
fn prefill_equals_decoding() {
    for (name, runtime) in runtimes() {
        let desc = desc(6, 2, 16);
        let (rows, dim) = (40, 6 * 16);
        let prefill = Scene::new(&desc, 16, Order::Hnd, &[(rows, rows)], alone, 3);
        let whole = prefill.check(name, runtime, "prefill");
        let attention = Attention::new(runtime, &desc).unwrap();
        // Row i sees i + 1 keys: 40 sequences over the same pages, which all begin alike.
        let lens: Vec<u32> = (1..=rows).collect();
        let counts = lens.iter().map(|len| len.div_ceil(16));
        let (offsets, q_offsets) = (offsets_of(counts.clone()), offsets_of(lens.iter().map(|_| 1)));
        let pages: Vec<u32> = counts.flat_map(|count| prefill.pages[..count as usize].to_vec()).collect();
        let table = PageTable { page_len: 16, offsets: &offsets, pages: &pages };
        let batch = Batch::paged(&desc, Lengths::Ragged { offsets: &q_offsets }, &lens, table);
        for cascade in [Cascade::Never, Cascade::Always] {
            let decoded = block(attention.run(&Batch { cascade, ..batch }, &prefill.paged.input())).unwrap();
            let want: Vec<f64> = whole.out.iter().map(|x| f64::from(*x)).collect();
            assert_eq!(want.len(), (rows * dim) as usize);
            compare(&decoded.out, &want, 1e-5, &format!("{name}: decoding, cascade {cascade:?}"));
        }
    }
}

/// vllm 936 and 30887, flashinfer 942: pages outside the window may be anything, even have no number that exists.
#[test]
fn case_9_pages_outside_the_window() {
    for (name, runtime) in runtimes() {
        for left in [0, 10, 50] {
            let desc = AttentionDesc { window: Window { left: Some(left), right: None }, ..desc(4, 2, 16) };
            let mut scene = Scene::new(&desc, 8, Order::Hnd, &[(1, 200), (3, 133), (20, 90)], alone, 9);
            let mut given_up = 0;
            for b in 0..3 {
                let rows = scene.q_offsets[b + 1] - scene.q_offsets[b];
                let seen = scene.batch().visible(&desc, b, 0).start..scene.batch().visible(&desc, b, rows - 1).end;
                for page in 0..scene.table_offsets[b + 1] - scene.table_offsets[b] {
                    if (page + 1) * 8 <= seen.start || page * 8 >= seen.end {
                        scene.pages[(scene.table_offsets[b] + page) as usize] = u32::MAX;
                        given_up += 1;
                    }
                }
            }
            assert!(given_up > 10);
            let attention = Attention::new(runtime, &desc).unwrap();
            let got = block(attention.run(&scene.batch(), &scene.paged.input())).unwrap();
            scene.expected().check(&got, true, &format!("{name}: window {left}"));
        }
    }
}

/// Shared beginnings at two depths: with cascade and without it equals the oracle, whatever the options.
#[test]
fn cascades() {
    for (name, runtime) in runtimes() {
        // All 9 share 320 keys; 0–3 and 4–7 share 128 more each; the last has only the first level.
        let owner = |b: usize, page: u32| match (b, page) {
            (_, 0..20) => 0,
            (1..=3, 20..28) => 0,
            (5..=7, 20..28) => 4,
            _ => b,
        };
        let lens: Vec<(u32, u32)> = (0..9).map(|b| (1, if b == 8 { 340 } else { 449 + 7 * b })).collect();
        let speculated: Vec<(u32, u32)> = lens.iter().map(|(_, kv)| (3, *kv)).collect();
        for (turn, lens) in [&lens, &speculated, &lens, &lens, &lens].into_iter().enumerate() {
            let heads = [8, 10, 14, 6, 4][turn]; // groups of 4, 5, 7, 3 and 2
            let desc = AttentionDesc {
                sinks: (turn % 2 == 1).then(|| (0..heads).map(|h| 2.0 + h as f32 / 4.0).collect()),
                softcap: (turn == 2).then_some(1.5),
                kv_dtype: [DType::F32, DType::F16][turn % 2],
                lse: turn != 3,
                causal: turn != 4,
                ..desc(heads, 2, 16)
            };
            let scene = Scene::new(&desc, 16, [Order::Hnd, Order::Nhd][turn % 2], lens, owner, 11);
            let attention = Attention::new(runtime, &desc).unwrap();
            let (batch, expected) = (scene.batch(), scene.expected());
            let read = |batch: &Batch| -> u32 {
                attention.planned_items(batch).unwrap().iter().map(|item| item.kv_end - item.kv_begin).sum()
            };
            let flat = Batch { cascade: Cascade::Never, ..batch };
            let (read, flat_read) = (read(&batch), read(&flat));
            assert!(4 * read < 3 * flat_read, "{name}: turn {turn}: {read} of {flat_read}");
            for (batch, what) in [(batch, "cascade"), (flat, "flat")] {
                let got = block(attention.run(&batch, &scene.paged.input())).unwrap();
                expected.check(&got, desc.lse, &format!("{name}: turn {turn}: {what}"));
            }
        }
    }
}

/// In a tile of many sequences rows stand one after the other: a window that reaches the first key from each row's own place
/// need not reach it from there.
#[test]
fn cascades_under_a_window_that_just_reaches() {
    for (name, runtime) in runtimes() {
        let window = Window { left: Some(391), right: None };
        let desc = AttentionDesc { window, causal: true, lse: true, ..desc(2, 2, 16) };
        let lens: Vec<(u32, u32)> = (0..64).map(|b| (1, 385 + b % 8)).collect();
        let owner = |b: usize, page: u32| if page < 24 { 0 } else { b };
        let scene = Scene::new(&desc, 16, Order::Hnd, &lens, owner, 12);
        let attention = Attention::new(runtime, &desc).unwrap();
        let batch = Batch { cascade: Cascade::Always, ..scene.batch() };
        let read: u32 = attention.planned_items(&batch).unwrap().iter().map(|item| item.kv_end - item.kv_begin).sum();
        assert!(read < 64 * 385 / 2, "{name}: {read}");
        scene.expected().check(&block(attention.run(&batch, &scene.paged.input())).unwrap(), true, name);
    }
}

/// A schedule serves layers with other slopes, but positions in shared tiles are not those of each sequence.
#[test]
fn a_cascade_is_not_run_with_alibi() {
    for (name, runtime) in runtimes() {
        let plain = desc(2, 2, 16);
        let sloped = AttentionDesc { alibi: Some(alibi_slopes(2)), ..plain.clone() };
        let owner = |b: usize, page: u32| if page < 24 { 0 } else { b };
        let scene = Scene::new(&plain, 16, Order::Hnd, &[(1, 390); 16], owner, 13);
        let [planned, used] = [&plain, &sloped].map(|desc| Attention::new(runtime, desc).unwrap());
        let batch = Batch { cascade: Cascade::Always, ..scene.batch() };
        let buffers = planned.upload(&batch, &scene.paged.input()).unwrap();
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let mut record = |batch: &Batch| used.record(&mut encoder, &planned.schedule(batch).unwrap(), &buffers.io());
        let error = record(&batch).unwrap_err();
        assert!(error.to_string().contains("Cascade::Never"), "{name}: {error}");
        record(&Batch { cascade: Cascade::Never, ..batch }).unwrap();
    }
}

/// rocm-libraries 12227: a sink counts once, with split keys, an empty split, a prefix, and groups of 5.
#[test]
fn case_20_sinks_count_once() {
    for (name, runtime) in runtimes() {
        let sinks: Vec<f32> = (0..10).map(|h| if h == 3 { f32::NEG_INFINITY } else { h as f32 }).collect();
        let desc = AttentionDesc { sinks: Some(sinks), ..desc(10, 2, 8) };
        let lens = [(1, 900), (2, 900), (4, 2), (1, 0), (1, 900)];
        let owner = |b: usize, page: u32| if page < 50 && b != 2 { 0 } else { b };
        Scene::new(&desc, 16, Order::Hnd, &lens, owner, 20).check(name, runtime, "sinks");
    }
}

/// flashinfer 4452: 34 rows, one key in page 1 of length 1.
#[test]
fn case_2_rows_before_the_only_key() {
    for (name, runtime) in runtimes() {
        let desc = desc(32, 8, 128);
        let attention = Attention::new(runtime, &desc).unwrap();
        let table = PageTable { page_len: 1, offsets: &[0, 1], pages: &[1] };
        let batch = Batch::paged(&desc, Lengths::Ragged { offsets: &[0, 34] }, &[1], table);
        let mut v = vec![f32::NAN; 8 * 128];
        v.resize(2 * 8 * 128, 1.0);
        let k = [vec![f32::NAN; 8 * 128], vec![0.5; 8 * 128]].concat();
        let input = HostInput { q: &[0.0; 34 * 32 * 128], k: &k, v: &v, bias: None, mask: HostMask::None };
        let got = block(attention.run(&batch, &input)).unwrap();
        let (before, last) = got.out.split_at(33 * 32 * 128);
        assert!(before.iter().all(|x| *x == 0.0), "{name}");
        assert!(last.iter().all(|x| *x == 1.0), "{name}");
        for lse in got.lse.chunks(34) {
            assert!(lse[..33].iter().all(|x| *x == f32::NEG_INFINITY) && lse[33] == 0.0, "{name}: {lse:?}");
        }
    }
}

/// flashinfer 4401: two rows on 129 keys, the last chunk holds nothing for row 0. flashinfer 1206, 728: chunks against steps.
#[test]
fn cases_3_21_split_keys() {
    for (name, runtime) in runtimes() {
        for kv_len in [128, 129, 257, 1025, 2000] {
            for rows in [1, 2, 4] {
                Scene::new(&desc(4, 4, 8), 16, Order::Hnd, &[(rows, kv_len)], alone, 3).check(name, runtime, "split");
            }
        }
    }
}

/// flashinfer 1148 and 1614: groups of 7, causal, split keys, each row of a group with its own end.
#[test]
fn case_13_groups_of_seven() {
    for (name, runtime) in runtimes() {
        let lens = [(4, 4), (3, 700), (1, 701), (2, 1)];
        Scene::new(&desc(28, 4, 8), 16, Order::Nhd, &lens, alone, 13).check(name, runtime, "28/4");
    }
}

/// vllm 945 and attention-gym 86: at decode the newest key has no ALiBi bias, older ones have less.
#[test]
fn case_19_alibi_at_decode() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { alibi: Some(vec![1.0]), ..desc(1, 1, 4) };
        let attention = Attention::new(runtime, &desc).unwrap();
        let table = PageTable { page_len: 2, offsets: &[0, 2], pages: &[1, 0] };
        let batch = Batch::paged(&desc, Lengths::Uniform { batch: 1, len: 1 }, &[3], table);
        let mut v = vec![0.0; 16];
        v[8..12].fill(1.0); // key 0: page 1, slot 0
        let input = HostInput { q: &[0.0; 4], k: &[0.0; 16], v: &v, bias: None, mask: HostMask::None };
        let got = block(attention.run(&batch, &input)).unwrap();
        let (oldest, sum) = ((-2f64).exp(), 1.0 + (-1f64).exp() + (-2f64).exp());
        compare(&got.out, &[oldest / sum; 4], 1e-6, name);
        compare(&got.lse, &[sum.ln()], 1e-6, name);
    }
}

/// Trees of speculative decoding: each sequence has a mask of its own size, in bits or in bytes.
#[test]
fn tree_masks() {
    for (name, runtime) in runtimes() {
        for (kind, group) in [(MaskKind::Bits, 4), (MaskKind::Bool, 7)] {
            let desc = AttentionDesc { mask: Some(kind), causal: false, ..desc(group, 1, 16) };
            let lens = [(5, 40), (0, 3), (9, 9), (1, 133), (7, 0), (12, 300)];
            let mut scene = Scene::new(&desc, 8, Order::Hnd, &lens, alone, 30);
            // A token sees the prompt, itself and its parents; one sequence's first row sees nothing.
            let mut data = Data::new(31);
            let (mut bits, mut bytes, mut offsets) = (vec![0u32; 3], vec![0u8; 5], Vec::new());
            for (b, (rows, keys)) in lens.into_iter().enumerate() {
                offsets.push(if kind == MaskKind::Bits { bits.len() } else { bytes.len() } as u64);
                let prompt = keys - rows.min(keys);
                let mut parents: Vec<Vec<u32>> = Vec::new();
                for row in 0..rows {
                    let mut seen = if row == 0 { Vec::new() } else { parents[data.below(row) as usize].clone() };
                    seen.push(prompt + row);
                    parents.push(seen.clone());
                    let visible = |key: u32| (key < prompt || seen.contains(&key)) && (b, row) != (2, 0);
                    let mut words = vec![0u32; keys.div_ceil(32) as usize];
                    (0..keys).filter(|key| visible(*key)).for_each(|key| words[key as usize / 32] |= 1 << (key % 32));
                    // Bits beyond the last key count for nothing.
                    if let Some(last) = words.last_mut()
                        && keys % 32 != 0
                    {
                        *last |= u32::MAX << (keys % 32);
                    }
                    bits.extend(words);
                    bytes.extend((0..keys).map(|key| if visible(key) { 1 + (key % 255) as u8 } else { 0 }));
                }
            }
            match kind {
                MaskKind::Bits => (scene.dense.bit_mask, scene.paged.bit_mask) = (Some(bits.clone()), Some(bits)),
                MaskKind::Bool => (scene.dense.bool_mask, scene.paged.bool_mask) = (Some(bytes.clone()), Some(bytes)),
            }
            let dense = Batch { mask_offsets: Some(&offsets), ..scene.dense_batch() };
            let paged = Batch { mask_offsets: Some(&offsets), ..scene.batch() };
            let expected = Expected::of(&desc, &dense, &scene.dense.input());
            assert!(expected.lse.iter().filter(|lse| **lse == f64::NEG_INFINITY).count() == 8 * group as usize);
            let attention = Attention::new(runtime, &desc).unwrap();
            for (batch, tensors, what) in [(dense, &scene.dense, "dense"), (paged, &scene.paged, "paged")] {
                let got = block(attention.run(&batch, &tensors.input())).unwrap();
                expected.check(&got, true, &format!("{name}: {kind:?}: {what}"));
            }
        }
    }
}

/// sglang 31501: a window belongs to the operation, so that a schedule made without it cannot be run with it.
#[test]
fn case_10_a_schedule_of_another_operation() {
    for (name, runtime) in runtimes() {
        let (plain, window) =
            (desc(2, 1, 8), AttentionDesc { window: Window { left: Some(3), right: None }, ..desc(2, 1, 8) });
        let scene = Scene::new(&plain, 4, Order::Hnd, &[(1, 20)], alone, 10);
        let (planned, used) = (Attention::new(runtime, &plain).unwrap(), Attention::new(runtime, &window).unwrap());
        let schedule = planned.schedule(&scene.batch()).unwrap();
        let buffers = planned.upload(&scene.batch(), &scene.paged.input()).unwrap();
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let error = used.record(&mut encoder, &schedule, &buffers.io()).unwrap_err();
        assert!(error.to_string().contains("schedule"), "{name}: {error}");
    }
}

/// flashinfer 3130, vllm 47671: a page number times the distance of pages beyond what offsets and bindings carry.
#[test]
fn cases_14_16_what_cannot_be_reached_is_refused() {
    for (_, runtime) in runtimes() {
        let desc = desc(8, 8, 128);
        let attention = Attention::new(runtime, &desc).unwrap();
        let limit = runtime.caps().limits.max_storage_buffer_binding_size;
        for page in [limit / (16 * 8 * 128 * 4), 1 << 17, 1 << 18, 1 << 20, u64::from(u32::MAX)] {
            let pages = [page as u32];
            let table = PageTable { page_len: 16, offsets: &[0, 1], pages: &pages };
            let batch = Batch::paged(&desc, Lengths::Uniform { batch: 1, len: 1 }, &[16], table);
            let error = attention.schedule(&batch).unwrap_err();
            assert!(matches!(error, Error::Limit { .. }), "page {page}: {error}");
            assert!(error.to_string().contains(" of k"), "{error}");
            // The page before the first one that cannot be bound is fine.
            let pages = [(limit / (16 * 8 * 128 * 4)) as u32 - 1];
            let table = PageTable { page_len: 16, offsets: &[0, 1], pages: &pages };
            attention.schedule(&Batch::paged(&desc, Lengths::Uniform { batch: 1, len: 1 }, &[16], table)).unwrap();
        }
        // 1024 rows of masks over 128 Ki keys in bytes are as much as a binding of 128 MiB holds; 2²² rows are too much for any.
        let masked = AttentionDesc { mask: Some(MaskKind::Bool), ..desc };
        let attention = Attention::new(runtime, &masked).unwrap();
        let batch = Batch {
            mask_offsets: Some(&[0]),
            q_layout: Layout::default(),
            k_layout: Layout { seq: 0, ..Layout::bshd(1, 8, 128) },
            v_layout: Layout { seq: 0, ..Layout::bshd(1, 8, 128) },
            ..Batch::new(
                &masked,
                Lengths::Uniform { batch: 1, len: 1 << 16 },
                Lengths::Uniform { batch: 1, len: 1 << 17 },
            )
        };
        let error = attention.schedule(&batch).unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
    }
}

#[test]
fn short_tables_are_refused() {
    let (_, runtime) = &runtimes()[0];
    let desc = desc(2, 1, 8);
    let attention = Attention::new(runtime, &desc).unwrap();
    for (offsets, lens, message) in [
        (&[0u32, 1, 3][..], &[17u32, 3][..], "2 pages for 17 tokens of sequence 0, got 1"),
        (&[0, 2, 2], &[17, 1], "1 pages for 1 tokens of sequence 1, got 0"),
        (&[0, 2, 5], &[17, 3], "5 pages"),
        (&[0, 2], &[17, 3], "2 sequences, got 1"),
    ] {
        let table = PageTable { page_len: 16, offsets, pages: &[0, 1, 2] };
        let error =
            attention.schedule(&Batch::paged(&desc, Lengths::Uniform { batch: 2, len: 1 }, lens, table)).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    // More pages than tokens need are welcome, pages of no use may have any number.
    let table = PageTable { page_len: 16, offsets: &[0, 3], pages: &[0, 1, u32::MAX] };
    attention.schedule(&Batch::paged(&desc, Lengths::Uniform { batch: 1, len: 1 }, &[17], table)).unwrap();
}

/// Dropped schedules leave their buffers to later ones, but not before the device is done with them.
#[test]
fn schedules_hand_their_buffers_on_in_time() {
    for (name, runtime) in runtimes() {
        let desc = desc(4, 2, 16);
        let attention = Attention::new(runtime, &desc).unwrap();
        let scenes: Vec<Scene> =
            (0..4).map(|i| Scene::new(&desc, 16, Order::Hnd, &[(1, 600 + i), (1, 90)], alone, i.into())).collect();
        let buffers: Vec<_> =
            scenes.iter().map(|scene| attention.upload(&scene.batch(), &scene.paged.input()).unwrap()).collect();
        let record = |encoder: &mut wgpu::CommandEncoder, i: usize| {
            let schedule = attention.schedule(&scenes[i].batch()).unwrap();
            attention.record(encoder, &schedule, &buffers[i].io()).unwrap();
            // and is dropped, before anything is submitted
        };
        let encoder = || runtime.device().create_command_encoder(&Default::default());
        // Two in one encoder; a third recorded and given up; a fourth in an encoder of its own, submitted first.
        let (mut both, mut never, mut apart) = (encoder(), encoder(), encoder());
        record(&mut both, 0);
        record(&mut both, 1);
        record(&mut never, 3);
        drop(never);
        record(&mut apart, 2);
        runtime.queue().submit([apart.finish()]);
        record(&mut both, 3);
        runtime.queue().submit([both.finish()]);
        for round in 0..2 {
            for (i, scene) in scenes.iter().enumerate() {
                let got = block(attention.download(&buffers[i])).unwrap();
                scene.expected().check(&got, true, &format!("{name}: round {round}: scene {i}"));
            }
            // All is done: the next round takes buffers that were used, all in flight at once.
            let mut encoder = encoder();
            for i in 0..4 {
                record(&mut encoder, i);
            }
            runtime.queue().submit([encoder.finish()]);
        }
    }
}
