//! Named shapes to measure, each with its arithmetic, its memory traffic, its data and its check. The command line,
//! criterion and the web page measure the same ones.
//!
//! A name is `attention/family/type/shape/mask`, like `attention/prefill/f16/b1-h16-s4096-d128/causal`, or ends with the
//! length of pages, like `attention/paged/f16/b16-h32x8-kv8192-d128/p16`; `kv8192+256` are keys that all sequences share and
//! keys of their own.

use std::collections::BTreeMap;

use crate::cache::PageTable;
use crate::error::Result;
use crate::host::{HostInput, HostMask};
use crate::ops::append::AppendDesc;
use crate::ops::attention::{AttentionDesc, Batch, Lengths, Window};
use crate::ops::rope::Rope;
use crate::reference;
use crate::view::DType;

/// A shape to measure.
#[derive(Clone, Debug)]
pub struct Case {
    /// See the module's docs.
    pub name: String,
    /// Sizes, types and options.
    pub desc: AttentionDesc,
    /// Rows and keys of the sequences.
    pub lengths: CaseLengths,
    /// Small enough for a software adapter.
    pub quick: bool,
    /// What is measured beside it.
    pub twin: Option<Twin>,
}

/// Other ways to compute a case, to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twin {
    /// In three passes, with all scores in memory.
    Unfused,
    /// Shared keys read for each sequence, and once for all, whatever the library would choose.
    Cascade,
}

/// Rows and keys of a case's sequences.
#[derive(Clone, Debug)]
pub enum CaseLengths {
    /// All the same.
    Uniform {
        /// Sequences.
        batch: u32,
        /// Rows of each.
        q_len: u32,
        /// Keys of each.
        kv_len: u32,
    },
    /// One after the other, [`Lengths::Ragged`].
    Ragged {
        /// Offsets of rows.
        q: Vec<u32>,
        /// Offsets of keys.
        kv: Vec<u32>,
    },
    /// Keys in pages `[page, kv_head, slot, dim]`.
    Paged {
        /// Rows of each sequence.
        q_len: u32,
        /// Keys of each sequence.
        kv_lens: Vec<u32>,
        /// See [`PageTable`].
        page_len: u32,
        /// See [`PageTable`].
        offsets: Vec<u32>,
        /// See [`PageTable`].
        pages: Vec<u32>,
        /// Pages of the pool.
        pool: u32,
    },
}

/// All cases, the quick ones first; within a family the smaller first.
pub fn all() -> Vec<Case> {
    let (f16, f32) = (DType::F16, DType::F32);
    let mut cases = Vec::new();
    let mut quick = |case: Case| cases.push(Case { quick: true, ..case });
    for len in [128, 256, 512] {
        quick(prefill("sweep", f16, 1, 2, len, 64, false));
    }
    quick(prefill("prefill", f16, 1, 2, 512, 128, false));
    quick(prefill("prefill", f16, 1, 2, 512, 128, true));
    quick(prefill("prefill", f32, 1, 2, 512, 64, true));
    quick(prefill("prefill", DType::Bf16, 2, 2, 257, 64, false));
    quick(windowed(prefill("window", f16, 1, 2, 512, 64, true), 128));
    quick(decode(f16, 1, 8, 2, 2048, 128));
    quick(decode(f16, 4, 8, 2, 512, 128));
    quick(paged(&decode(f16, 4, 8, 2, 512, 128), 0, 1));
    quick(paged(&decode(f16, 4, 8, 2, 512, 128), 0, 16));
    quick(paged(&decode(f16, 8, 8, 2, 1088, 128), 1024, 16));
    quick(ragged(f16, 8, 2, 64, &[(150, 150), (64, 200), (1, 500), (1, 77), (1, 300), (1, 1)]));

    for len in [128, 256, 512, 1024, 2048, 4096] {
        cases.push(prefill("sweep", f16, 1, 4, len, 64, false));
    }
    for causal in [false, true] {
        cases.push(prefill("prefill", f16, 1, 16, 4096, 128, causal));
        cases.push(prefill("prefill", f16, 4, 16, 4096, 64, causal));
        cases.push(prefill("prefill", f32, 1, 16, 4096, 128, causal));
        cases.push(prefill("prefill", f16, 2, 16, 8192, 128, causal));
    }
    cases.push(windowed(prefill("window", f16, 1, 16, 4096, 128, true), 1024));
    cases.push(decode(f16, 1, 32, 8, 32_768, 128));
    let batched = decode(f16, 16, 32, 8, 8192, 128);
    cases.push(batched.clone());
    for page_len in [1, 16, 64, 256] {
        cases.push(paged(&batched, 0, page_len));
    }
    // A system prompt before many conversations; a document before a few questions.
    cases.push(paged(&decode(f16, 64, 32, 8, 2048 + 256, 128), 2048, 16));
    cases.push(paged(&decode(f16, 8, 32, 8, 32_768 + 64, 128), 32_768, 16));
    // A server's step: two prompts begin, one goes on, 61 sequences decode.
    let mut step = vec![(2048, 2048), (700, 700), (512, 4096)];
    step.extend((0..61).map(|i| (1, 64 + 41 * i)));
    cases.push(ragged(f16, 32, 8, 128, &step));
    cases
}

/// New tokens to be written to pages of a cache, Q and K turned.
#[derive(Clone, Debug)]
pub struct AppendCase {
    /// `append/phase/type/shape/pages`.
    pub name: String,
    /// Sizes, types and rotary embedding.
    pub desc: AppendDesc,
    /// Sequences.
    pub batch: u32,
    /// New tokens of each, its last ones.
    pub new: u32,
    /// Tokens of each with them.
    pub kv_len: u32,
    /// Tokens of a page.
    pub page_len: u32,
    /// Small enough for a software adapter.
    pub quick: bool,
}

/// All appends, the quick ones first.
pub fn appends() -> Vec<AppendCase> {
    let case = |phase: &str, batch: u32, new: u32, kv_len: u32, heads: u32, kv_heads: u32, quick: bool| AppendCase {
        name: format!("append/{phase}/f16/b{batch}-h{heads}x{kv_heads}-s{new}-d128/p16"),
        desc: AppendDesc {
            heads,
            kv_heads,
            head_dim: 128,
            v_head_dim: None,
            dtype: DType::F16,
            cache_dtype: DType::F16,
            rope: Some(Rope::default()),
        },
        batch,
        new,
        kv_len,
        page_len: 16,
        quick,
    };
    vec![
        case("decode", 32, 1, 100, 8, 2, true),
        case("prefill", 1, 512, 512, 8, 2, true),
        case("decode", 256, 1, 2048, 32, 8, false),
        case("prefill", 4, 4096, 4096, 32, 8, false),
    ]
}

impl AppendCase {
    /// Bytes that must move: each new row read once and written once.
    pub fn bytes(&self) -> f64 {
        let desc = &self.desc;
        let cached = desc.kv_heads * (desc.head_dim + desc.v_dim());
        let row = |dtype: DType, elements: u32| f64::from(elements) * dtype.size() as f64;
        let token =
            2.0 * row(desc.dtype, desc.heads * desc.head_dim) + row(desc.dtype, cached) + row(desc.cache_dtype, cached);
        f64::from(self.batch * self.new) * token
    }

    /// Rows of new tokens of unit variance, the same on every machine: Q, K, V.
    pub fn data(&self) -> CaseData {
        let desc = &self.desc;
        let tensor = |stream: u64, heads: u32, dim: u32| {
            let len = u64::from(self.batch * self.new) * u64::from(heads * dim);
            (0..len).map(|i| desc.dtype.round(value(stream, i))).collect()
        };
        CaseData {
            q: tensor(1, desc.heads, desc.head_dim),
            k: tensor(2, desc.kv_heads, desc.head_dim),
            v: tensor(3, desc.kv_heads, desc.v_dim()),
        }
    }
}

fn typed(dtype: DType, heads: u32, kv_heads: u32, head_dim: u32, causal: bool) -> AttentionDesc {
    AttentionDesc {
        heads,
        kv_heads,
        head_dim,
        q_dtype: dtype,
        kv_dtype: dtype,
        out_dtype: dtype,
        causal,
        ..AttentionDesc::default()
    }
}

fn prefill(family: &str, dtype: DType, batch: u32, heads: u32, len: u32, dim: u32, causal: bool) -> Case {
    let mask = if causal { "causal" } else { "full" };
    Case {
        name: format!("attention/{family}/{dtype}/b{batch}-h{heads}-s{len}-d{dim}/{mask}"),
        desc: typed(dtype, heads, heads, dim, causal),
        lengths: CaseLengths::Uniform { batch, q_len: len, kv_len: len },
        quick: false,
        twin: Some(Twin::Unfused),
    }
}

/// One token a sequence, which sees all keys.
fn decode(dtype: DType, batch: u32, heads: u32, kv_heads: u32, kv_len: u32, dim: u32) -> Case {
    Case {
        name: format!("attention/decode/{dtype}/b{batch}-h{heads}x{kv_heads}-kv{kv_len}-d{dim}"),
        desc: typed(dtype, heads, kv_heads, dim, true),
        lengths: CaseLengths::Uniform { batch, q_len: 1, kv_len },
        quick: false,
        twin: None,
    }
}

/// `decoding` with its keys in pages, at random places of a pool; the first `shared` keys are the same for all sequences.
fn paged(decoding: &Case, shared: u32, page_len: u32) -> Case {
    let CaseLengths::Uniform { batch, q_len, kv_len } = decoding.lengths else { unreachable!("decoding is uniform") };
    let (shared_pages, own_pages) = (shared / page_len, (kv_len - shared).div_ceil(page_len));
    assert_eq!(shared % page_len, 0, "only whole pages are shared");
    let pool = shared_pages + batch * own_pages;
    let order = shuffled(pool);
    let (prefix, rest) = order.split_at(shared_pages as usize);
    let pages = rest.chunks(own_pages as usize).flat_map(|own| [prefix, own].concat()).collect();
    let (family, twin) = if shared > 0 { ("cascade", Some(Twin::Cascade)) } else { ("paged", None) };
    let name = decoding.name.replace("/decode/", &format!("/{family}/"));
    let name = match shared {
        0 => name,
        _ => name.replace(&format!("-kv{kv_len}-"), &format!("-kv{shared}+{}-", kv_len - shared)),
    };
    Case {
        name: format!("{name}/p{page_len}"),
        lengths: CaseLengths::Paged {
            q_len,
            kv_lens: vec![kv_len; batch as usize],
            page_len,
            offsets: (0..=batch).map(|b| b * (shared_pages + own_pages)).collect(),
            pages,
            pool,
        },
        twin,
        ..decoding.clone()
    }
}

fn windowed(case: Case, keys: u32) -> Case {
    Case {
        name: case.name.replace("/causal", &format!("/w{keys}")),
        desc: AttentionDesc { window: Window { left: Some(keys - 1), right: None }, ..case.desc },
        twin: None,
        ..case
    }
}

/// Sequences of (rows, keys).
fn ragged(dtype: DType, heads: u32, kv_heads: u32, dim: u32, sequences: &[(u32, u32)]) -> Case {
    let offsets = |lens: &mut dyn Iterator<Item = u32>| {
        let mut end = 0;
        std::iter::once(0).chain(lens.map(|len| (end += len, end).1)).collect::<Vec<u32>>()
    };
    let q = offsets(&mut sequences.iter().map(|s| s.0));
    let kv = offsets(&mut sequences.iter().map(|s| s.1));
    let (rows, keys) = (q[sequences.len()], kv[sequences.len()]);
    Case {
        name: format!("attention/ragged/{dtype}/{}seqs-h{heads}x{kv_heads}-q{rows}-kv{keys}-d{dim}", sequences.len()),
        desc: typed(dtype, heads, kv_heads, dim, true),
        lengths: CaseLengths::Ragged { q, kv },
        quick: false,
        twin: None,
    }
}

/// Tensors of a case on the host, exact in its types.
#[derive(Clone, Debug)]
pub struct CaseData {
    /// Q.
    pub q: Vec<f32>,
    /// K.
    pub k: Vec<f32>,
    /// V.
    pub v: Vec<f32>,
}

impl CaseData {
    /// As the oracle takes them.
    pub fn input(&self) -> HostInput<'_> {
        HostInput { q: &self.q, k: &self.k, v: &self.v, bias: None, mask: HostMask::None }
    }
}

impl Case {
    /// The batch; tensors are contiguous, or pages of contiguous pools.
    pub fn batch(&self) -> Batch<'_> {
        match &self.lengths {
            CaseLengths::Uniform { batch, q_len, kv_len } => {
                let lengths = |len: &u32| Lengths::Uniform { batch: *batch, len: *len };
                Batch::new(&self.desc, lengths(q_len), lengths(kv_len))
            }
            CaseLengths::Ragged { q, kv } => {
                Batch::new(&self.desc, Lengths::Ragged { offsets: q }, Lengths::Ragged { offsets: kv })
            }
            CaseLengths::Paged { q_len, kv_lens, page_len, offsets, pages, .. } => {
                let table = PageTable { page_len: *page_len, offsets, pages };
                let q = Lengths::Uniform { batch: kv_lens.len() as u32, len: *q_len };
                Batch::paged(&self.desc, q, kv_lens, table)
            }
        }
    }

    /// The second part of the name: `prefill`, `decode`, `paged`, `cascade`, `ragged`, `window` or `sweep`.
    pub fn family(&self) -> &str {
        self.name.split('/').nth(1).unwrap_or_default()
    }

    /// Whether what takes time is reading K and V.
    pub fn is_decoding(&self) -> bool {
        matches!(self.family(), "decode" | "paged" | "cascade")
    }

    /// Tokens of Q, and tokens that K and V hold.
    fn tokens(&self) -> (u64, u64) {
        let batch = self.batch();
        let total = |lengths: Lengths| (0..lengths.batch()).map(|b| u64::from(lengths.len(b))).sum();
        let keys = match self.lengths {
            CaseLengths::Paged { page_len, pool, .. } => u64::from(page_len) * u64::from(pool),
            _ => total(batch.kv),
        };
        (total(batch.q), keys)
    }

    /// Elements of Q, K, V and O.
    pub fn elements(&self) -> [u64; 4] {
        let (rows, keys) = self.tokens();
        let (dim, v_dim) = (u64::from(self.desc.head_dim), u64::from(self.desc.v_dim()));
        let (heads, kv_heads) = (u64::from(self.desc.heads), u64::from(self.desc.kv_heads));
        [rows * heads * dim, keys * kv_heads * dim, keys * kv_heads * v_dim, rows * heads * v_dim]
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.batch().flops(&self.desc)
    }

    /// Bytes that must move at least: Q and O, and once every K and V that some row sees, shared ones once for all.
    pub fn bytes(&self) -> f64 {
        let batch = self.batch();
        let mut seen: BTreeMap<(usize, u32), u32> = BTreeMap::new(); // by sequence, or by page
        for b in 0..batch.q.batch() {
            let keys = batch.visible_to_any(&self.desc, b);
            let Some(table) = &batch.pages else {
                seen.insert((b, 0), keys.len() as u32);
                continue;
            };
            for (i, page) in table.of(b).iter().enumerate() {
                let first = i as u32 * table.page_len;
                let count = keys.end.min(first + table.page_len).saturating_sub(keys.start.max(first));
                let known = seen.entry((0, *page)).or_default();
                *known = count.max(*known);
            }
        }
        let keys: u64 = seen.values().map(|count| u64::from(*count)).sum();
        let [q, _, _, out] = self.elements();
        let desc = &self.desc;
        let kv = keys * u64::from(desc.kv_heads) * u64::from(desc.head_dim + desc.v_dim());
        (q * desc.q_dtype.size() + kv * desc.kv_dtype.size() + out * desc.out_dtype.size()) as f64
    }

    /// Values of about unit variance, the same on every machine.
    pub fn data(&self) -> CaseData {
        let [q, k, v, _] = self.elements();
        let tensor = |stream: u64, len: u64, dtype: DType| (0..len).map(|i| dtype.round(value(stream, i))).collect();
        CaseData {
            q: tensor(1, q, self.desc.q_dtype),
            k: tensor(2, k, self.desc.kv_dtype),
            v: tensor(3, v, self.desc.kv_dtype),
        }
    }
}

/// Hashes a counter.
fn hash(stream: u64, counter: u64) -> u64 {
    mix(counter.wrapping_add(stream << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The numbers below `count` in an order that looks random, the same on every machine.
pub fn shuffled(count: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    for i in (1..count as usize).rev() {
        order.swap(i, hash(5, i as u64) as usize % (i + 1));
    }
    order
}

/// The finaliser of SplitMix64.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The sum of four uniform values: close to normal, mean 0, variance 1.
fn value(stream: u64, counter: u64) -> f32 {
    let bits = hash(stream, counter);
    let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
    (sum as f32 / 65_535.0 - 2.0) * 1.732_050_8
}

/// What an output must be: oracle rows, and how far from them a kernel may be.
#[derive(Clone, Debug)]
pub struct Check {
    rows: Vec<CheckedRow>,
    arithmetic: f64, // error that f32 arithmetic may make
    rounding: f64,   // relative, of the output type
}

#[derive(Clone, Debug)]
struct CheckedRow {
    place: String,
    first: usize,
    values: Vec<f64>,
}

/// Oracle rows of a case, if it has so many.
const ROWS: usize = 64;

impl Check {
    /// Computes the first and the last row, those at tile edges, and random ones up to 64.
    ///
    /// Allowed is twice the error of the same rows done plainly in f32, plus 4 ulp of f32 at max |V|, plus one ulp of the
    /// output's type at its own size: over many keys O is much smaller than V, and zeros must not pass.
    pub fn new(case: &Case, data: &CaseData) -> Result<Self> {
        let (desc, batch, input) = (&case.desc, case.batch(), data.input());
        let mut rows = Vec::new();
        let mut error = 0f64;
        for (b, head, row) in chosen_rows(case) {
            let (values, _) = reference::attention_row::<f64>(desc, &batch, &input, b, head, row)?;
            let (plain, _) = reference::attention_row::<f32>(desc, &batch, &input, b, head, row)?;
            error = values.iter().zip(&plain).map(|(a, b)| (a - f64::from(*b)).abs()).fold(error, f64::max);
            let layout = &batch.out_layout;
            let first = batch.q.start(b, layout) + u64::from(row) * layout.seq + u64::from(head) * layout.head;
            let place = format!("sequence {b}, head {head}, row {row}");
            rows.push(CheckedRow { place, first: first as usize, values });
        }
        let max_v = data.v.iter().fold(0f32, |max, x| max.max(x.abs()));
        let rounding = match desc.out_dtype {
            DType::F32 => 2f64.powi(-23),
            DType::F16 => 2f64.powi(-10),
            DType::Bf16 => 2f64.powi(-7),
        };
        Ok(Check { rows, arithmetic: 2.0 * error + 4.0 * 2f64.powi(-23) * f64::from(max_v), rounding })
    }

    /// The largest error in the oracle rows, or what is wrong.
    pub fn against_oracle(&self, out: &[f32]) -> std::result::Result<f64, String> {
        let mut worst = 0f64;
        for row in &self.rows {
            for (dim, want) in row.values.iter().enumerate() {
                let got = out.get(row.first + dim).map_or(f64::NAN, |x| f64::from(*x));
                let error = (got - want).abs();
                if error.is_nan() || error > self.arithmetic + self.rounding * want.abs() {
                    return Err(format!("{}, dim {dim}: {got:.6}, not {want:.6}", row.place));
                }
                worst = worst.max(error);
            }
        }
        Ok(worst)
    }

    /// Whether two outputs, each allowed its error, agree everywhere.
    pub fn against_other(&self, out: &[f32], other: &[f32]) -> std::result::Result<(), String> {
        let allowed = |a: &f32| self.arithmetic + self.rounding * f64::from(a.abs());
        let far = |(a, b): (&f32, &f32)| (a - b).is_nan() || f64::from(a - b).abs() > allowed(a) + allowed(b);
        match out.iter().zip(other).position(far) {
            Some(i) => Err(format!("element {i}: {:.6}, the portable variant has {:.6}", out[i], other[i])),
            None if out.len() != other.len() => Err(format!("{} elements, not {}", out.len(), other.len())),
            None => Ok(()),
        }
    }
}

/// (sequence, head, row), every row if there are few.
fn chosen_rows(case: &Case) -> Vec<(usize, u32, u32)> {
    let (batch, heads) = (case.batch(), case.desc.heads);
    let sequences: Vec<usize> = (0..batch.q.batch()).filter(|b| batch.q.len(*b) > 0).collect();
    let (rows, _) = case.tokens();
    if rows * u64::from(heads) <= ROWS as u64 {
        let rows_of = |b: usize| (0..heads).flat_map(move |head| (0..batch.q.len(b)).map(move |row| (b, head, row)));
        return sequences.into_iter().flat_map(rows_of).collect();
    }
    let mut chosen = Vec::new();
    let mut choose = |b: usize, head: u32, row: u32| {
        if row < batch.q.len(b) && !chosen.contains(&(b, head, row)) {
            chosen.push((b, head, row));
        }
        chosen.len()
    };
    let (first, last) = (sequences[0], sequences[sequences.len() - 1]);
    for (i, row) in [0, 15, 16, 17, 63, 64, 65].into_iter().enumerate() {
        choose(first, i as u32 % heads, row);
    }
    choose(first, heads - 1, batch.q.len(first) - 1);
    choose(last, heads - 1, batch.q.len(last) - 1);
    for i in 0.. {
        let bits = hash(4, i);
        let b = sequences[(bits >> 48) as usize % sequences.len()];
        if choose(b, (bits >> 32) as u32 % heads, bits as u32 % batch.q.len(b)) >= ROWS {
            break;
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_filters_find_families() {
        let names: std::collections::BTreeSet<_> = all().into_iter().map(|case| case.name).collect();
        assert_eq!(names.len(), all().len());
        for family in ["prefill", "decode", "paged", "cascade", "ragged", "window", "sweep"] {
            for quick in [true, false] {
                assert!(all().iter().any(|case| case.family() == family && case.quick == quick), "{family}");
            }
        }
    }

    #[test]
    fn pages_are_each_used_once_or_shared_by_all() {
        for case in all() {
            let CaseLengths::Paged { page_len, offsets, pages, pool, .. } = &case.lengths else { continue };
            let (table, batch) = (case.batch().pages.unwrap(), offsets.len() - 1);
            let mut uses = vec![0; *pool as usize];
            pages.iter().for_each(|page| uses[*page as usize] += 1);
            let shared = table.of(0).iter().zip(table.of(1)).take_while(|(a, b)| a == b).count();
            assert_eq!(uses.iter().filter(|uses| **uses == batch).count(), shared, "{}", case.name);
            assert_eq!(uses.iter().filter(|uses| **uses == 1).count(), *pool as usize - shared, "{}", case.name);
            assert_eq!(case.family() == "cascade", shared > 0, "{}", case.name);
            assert!(case.name.ends_with(&format!("/p{page_len}")) && !pages.is_sorted(), "{}", case.name);
        }
    }

    #[test]
    fn shared_keys_are_read_once() {
        let one_token = 2.0 * 2.0 * 2.0 * 128.0; // K and V of 2 heads of 128 in f16
        let rows = |batch: f64| 2.0 * batch * 8.0 * 128.0 * 2.0;
        let flat = paged(&decode(DType::F16, 4, 8, 2, 512, 128), 0, 16);
        assert_eq!(flat.bytes(), rows(4.0) + 4.0 * 512.0 * one_token);
        let cascade = paged(&decode(DType::F16, 4, 8, 2, 512, 128), 480, 16);
        assert_eq!(cascade.bytes(), rows(4.0) + (480.0 + 4.0 * 32.0) * one_token);
        assert_eq!(cascade.flops(), flat.flops());
    }

    #[test]
    fn flops_and_bytes_count_what_is_visible() {
        let full = prefill("prefill", DType::F16, 1, 16, 4096, 128, false);
        assert_eq!(full.flops(), 4.0 * 16.0 * 4096.0 * 4096.0 * 128.0);
        assert_eq!(full.bytes(), 4.0 * 4096.0 * 16.0 * 128.0 * 2.0);
        let causal = prefill("prefill", DType::F16, 1, 16, 4096, 128, true);
        assert_eq!(causal.flops(), full.flops() * 4097.0 / 4096.0 / 2.0);
        assert_eq!(causal.bytes(), full.bytes());
        let decoding = decode(DType::F16, 16, 32, 8, 8192, 128);
        assert_eq!(decoding.flops(), 4.0 * 16.0 * 32.0 * 8192.0 * 128.0);
        assert_eq!(decoding.bytes(), 2.0 * (2.0 * 16.0 * 32.0 * 128.0 + 2.0 * 16.0 * 8.0 * 8192.0 * 128.0));
        let window = windowed(causal, 1024);
        assert_eq!(window.flops(), 4.0 * 16.0 * 128.0 * (1024.0 * 4096.0 - 1024.0 * 1023.0 / 2.0));
    }

    #[test]
    fn every_case_is_valid_and_its_checked_rows_exist() {
        for case in all() {
            case.desc.validate().unwrap();
            case.batch().validate().unwrap();
            let rows = chosen_rows(&case);
            assert!(rows.len() >= ROWS.min(case.tokens().0 as usize * case.desc.heads as usize), "{}", case.name);
            assert!(rows.iter().all(|(b, head, row)| *row < case.batch().q.len(*b) && *head < case.desc.heads));
        }
    }

    #[test]
    fn data_has_unit_variance_and_a_wrong_output_is_noticed() {
        let case = &all()[0];
        let data = case.data();
        let variance = data.k.iter().map(|x| x * x).sum::<f32>() / data.k.len() as f32;
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
        assert_ne!(data.k[..100], data.v[..100]);

        let check = Check::new(case, &data).unwrap();
        let (exact, _) = reference::attention::<f32>(&case.desc, &case.batch(), &data.input()).unwrap();
        assert!(check.against_oracle(&exact).unwrap() < 1e-5);
        for wrong in [f32::NAN, 3.0] {
            let mut out = exact.clone();
            *out.last_mut().unwrap() = wrong;
            assert!(check.against_oracle(&out).is_err());
            assert!(check.against_other(&out, &exact).is_err());
        }
        assert!(check.against_oracle(&exact[1..]).is_err());
    }

    #[test]
    fn zeros_do_not_pass_for_the_small_outputs_of_many_keys() {
        let case = decode(DType::F16, 1, 4, 2, 2048, 16);
        let check = Check::new(&case, &case.data()).unwrap();
        assert!(check.against_oracle(&[0.0; 64]).is_err());
    }
}
