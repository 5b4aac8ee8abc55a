//! Choosing and planning on emulated adapters, with no GPU at all.

mod common;

use std::collections::BTreeMap;

use common::*;
use proptest::prelude::*;
use wgpu_attention::ops::attention;
use wgpu_attention::*;

/// A device that computes nothing, with these features and subgroup sizes.
fn emulated(features: wgpu::Features, subgroup: (u32, u32), mask: CapsMask) -> Runtime {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::NOOP;
    descriptor.backend_options.noop = wgpu::NoopBackendOptions {
        enable: true,
        features: Some(features),
        subgroup_min_size: Some(subgroup.0),
        subgroup_max_size: Some(subgroup.1),
        ..Default::default()
    };
    let instance = wgpu::Instance::new(descriptor);
    let adapter = block(instance.request_adapter(&Default::default())).unwrap();
    let device = wgpu::DeviceDescriptor { required_features: features, ..Default::default() };
    let (device, queue) = block(adapter.request_device(&device)).unwrap();
    block(Runtime::new(device, queue, RuntimeOptions { mask, self_test: SelfTest::All, ..RuntimeOptions::default() }))
        .unwrap()
}

fn plain() -> Runtime {
    emulated(wgpu::Features::empty(), (4, 128), CapsMask::default())
}

fn chosen(runtime: &Runtime, v_dim: u32) -> Vec<&'static str> {
    let desc = AttentionDesc { v_head_dim: Some(v_dim), ..AttentionDesc::default() };
    Attention::new(runtime, &desc).unwrap().variants()
}

#[test]
fn emulated_adapters_choose_the_expected_rows() {
    let names = |decode: &str, short: &str, tall: &str| {
        let all = [("decode", decode), ("short", short), ("tall", tall)];
        let named = all.into_iter().filter(|(_, name)| !name.is_empty());
        named.map(|(form, name)| format!("attention.{form}.{name}")).collect::<Vec<_>>()
    };
    let portable = names("portable.q4", "portable.q16k64", "portable.q64k32");
    assert_eq!(chosen(&plain(), 64), portable);
    assert_eq!(chosen(&plain(), 200), names("portable.q4", "portable.q16k64", "portable.q32k64"));
    assert_eq!(chosen(&plain(), 512), names("", "portable.q16k64", "portable.q16k64"));
    let f16_only = emulated(wgpu::Features::SHADER_F16, (4, 128), CapsMask::default());
    assert_eq!(chosen(&f16_only, 64), portable);

    let subgroups = |min, max| emulated(wgpu::Features::SUBGROUP, (min, max), CapsMask::default());
    assert_eq!(chosen(&subgroups(4, 4), 64), names("subgroup4.q4", "subgroup4.q16k64", "subgroup4.q32k64"));
    assert_eq!(chosen(&subgroups(8, 8), 64), names("subgroup4.q4", "subgroup4.q16k64", "subgroup4.q32k64"));
    assert_eq!(chosen(&subgroups(8, 32), 64), names("subgroup8.q4", "subgroup8.q16k64", "subgroup8.q64k32"));
    for (min, max) in [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128)] {
        assert_eq!(
            chosen(&subgroups(min, max), 64),
            names("subgroup8.q4", "subgroup16.q16k64", "subgroup8.q64k32"),
            "{min}…{max}"
        );
        assert_eq!(
            chosen(&subgroups(min, max), 200),
            names("subgroup16.q4", "subgroup16.q16k64", "subgroup16.q32k64"),
            "{min}…{max}"
        );
    }
    // An adapter that guarantees less than 4, as one whose data is missing might: no shuffles.
    assert_eq!(chosen(&subgroups(1, 128), 64), portable);
    // The feature taken away by a mask.
    let mask = CapsMask { without: wgpu::Features::SUBGROUP, ..CapsMask::default() };
    assert_eq!(chosen(&emulated(wgpu::Features::SUBGROUP, (32, 32), mask), 64), portable);
    // Little workgroup memory: the row that fits.
    let mask = CapsMask { workgroup_bytes: Some(12 << 10), ..CapsMask::default() };
    assert_eq!(
        chosen(&emulated(wgpu::Features::empty(), (4, 4), mask), 32),
        names("portable.q4", "portable.q16k64", "portable.q16k64")
    );
    // Few invocations.
    let mask = CapsMask { invocations: Some(64), ..CapsMask::default() };
    assert_eq!(
        chosen(&emulated(wgpu::Features::empty(), (4, 4), mask), 32),
        names("portable.q4", "portable.q16k64", "portable.q16k64")
    );
}

#[test]
fn forced_variants() {
    let runtime = emulated(wgpu::Features::SUBGROUP, (32, 32), CapsMask::default());
    let forced =
        |name: &str| Attention::new(&runtime, &AttentionDesc { variant: Some(name.into()), ..Default::default() });
    assert_eq!(forced("attention.tall.portable.q64k32").unwrap().variants(), ["attention.tall.portable.q64k32"]);
    let portable =
        ["attention.decode.portable.q4", "attention.short.portable.q16k64", "attention.tall.portable.q64k32"];
    assert_eq!(forced("portable").unwrap().variants(), portable);
    assert!(matches!(forced("nonsense"), Err(Error::Shape { .. })));
    let wide = AttentionDesc { variant: Some("q64k32".into()), v_head_dim: Some(300), ..Default::default() };
    assert!(matches!(Attention::new(&runtime, &wide), Err(Error::Unsupported { .. })));
    let none = AttentionDesc { variant: Some("subgroup8".into()), ..Default::default() };
    assert!(matches!(Attention::new(&plain(), &none), Err(Error::Unsupported { .. })));
}

#[test]
fn wrong_descriptors_are_refused() {
    let runtime = plain();
    let good = AttentionDesc { heads: 4, kv_heads: 2, ..AttentionDesc::default() };
    let refused = |desc: AttentionDesc, part: &str| {
        let message = Attention::new(&runtime, &desc).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    Attention::new(&runtime, &good).unwrap();
    refused(AttentionDesc { heads: 0, ..good.clone() }, "heads");
    refused(AttentionDesc { kv_heads: 0, ..good.clone() }, "kv_heads");
    refused(AttentionDesc { kv_heads: 3, ..good.clone() }, "divisor");
    refused(AttentionDesc { heads: 4096, kv_heads: 1, ..good.clone() }, "2048");
    refused(AttentionDesc { head_dim: 577, ..good.clone() }, "576");
    refused(AttentionDesc { head_dim: 0, ..good.clone() }, "head_dim");
    refused(AttentionDesc { v_head_dim: Some(0), ..good.clone() }, "v_head_dim");
    refused(AttentionDesc { v_head_dim: Some(513), ..good.clone() }, "512");
    refused(AttentionDesc { scale: Some(f32::NAN), ..good.clone() }, "scale");
    refused(AttentionDesc { softcap: Some(0.0), ..good.clone() }, "softcap");
    refused(AttentionDesc { softcap: Some(f32::INFINITY), ..good.clone() }, "softcap");
    refused(AttentionDesc { softcap: Some(1e-40), ..good.clone() }, "softcap");
    refused(AttentionDesc { alibi: Some(vec![0.5; 3]), ..good.clone() }, "one for each of 4");
    refused(AttentionDesc { sinks: Some(vec![f32::NAN; 4]), ..good.clone() }, "sinks");
}

#[test]
fn wrong_batches_are_refused() {
    let desc = AttentionDesc { heads: 4, kv_heads: 2, head_dim: 8, ..AttentionDesc::default() };
    let attention = Attention::new(&plain(), &desc).unwrap();
    let uniform = |batch, len| Lengths::Uniform { batch, len };
    let refused = |batch: Batch, part: &str| {
        let message = attention.schedule(&batch).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    let new = |q, kv| Batch::new(&desc, q, kv);
    let good = new(uniform(2, 3), uniform(2, 5));
    attention.schedule(&good).unwrap();
    refused(new(uniform(2, 3), uniform(3, 5)), "2 sequences");
    refused(new(Lengths::Ragged { offsets: &[] }, uniform(0, 5)), "offsets");
    refused(new(Lengths::Ragged { offsets: &[1, 2] }, uniform(1, 5)), "first offset of 0");
    refused(new(Lengths::Ragged { offsets: &[0, 4, 2] }, uniform(2, 5)), "ascending");
    refused(new(uniform(1, 2), Lengths::Padded { max_len: 4, lens: &[5] }), "at most 4");
    refused(Batch { start: Start::Explicit(&[0]), ..good }, "one for each of 2");
    refused(Batch { start: Start::Explicit(&[0, i32::MIN]), ..good }, "limit");
    refused(Batch { out_layout: Layout { head: 4, ..good.out_layout }, ..good }, "coincide");
    refused(Batch { out_layout: Layout { batch: 0, ..good.out_layout }, ..good }, "coincide");
    refused(Batch { out_layout: Layout { seq: 8, ..good.out_layout }, ..good }, "coincide");
}

/// Every packed row meets every key that it sees exactly once, in the page that holds it, and items stay in bounds.
/// Returns how many keys items read.
fn check_coverage(attention: &Attention, batch: &Batch) -> u64 {
    let desc = attention.desc();
    let items = attention.planned_items(batch).unwrap();
    let group = desc.heads / desc.kv_heads;
    let Lengths::Ragged { offsets } = batch.q else { panic!("ragged rows, so that items say which they are") };
    let sequence_of = |token: u32| offsets.partition_point(|offset| *offset <= token) - 1;
    let mut met: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new(); // packed row of the batch → keys it meets
    let mut loads: BTreeMap<usize, u32> = BTreeMap::new();
    let mut read = 0;
    for item in &items {
        assert!(item.row_count >= 1 && item.kv_begin <= item.kv_end);
        *loads.entry(item.dispatch).or_default() += 1;
        read += u64::from(item.kv_end - item.kv_begin);
        for row in item.row_begin..item.row_begin + item.row_count {
            let token = item.q / (desc.heads * desc.head_dim) + row / group;
            let b = sequence_of(token);
            assert!(item.kv_end <= batch.kv.len(b));
            // As the kernel does it.
            let (position, window) = (i64::from(item.q_pos) + i64::from(row / group), desc.effective_window());
            let low = window.left.map_or(0, |left| position - i64::from(left)).max(item.kv_begin.into());
            let high = window.right.map_or(i64::MAX, |right| position + i64::from(right) + 1).min(item.kv_end.into());
            let keys = met.entry(token * group + row % group).or_default();
            if low < high {
                keys.push((low as u32, high as u32));
            }
            if let Some(pages) = batch.pages {
                for page in low / i64::from(pages.page_len)..(high - 1).max(0) / i64::from(pages.page_len) + 1 {
                    let named = pages.pages[item.table as usize + page as usize];
                    assert!(low >= high || named == pages.of(b)[page as usize], "page {page} of sequence {b}");
                }
            }
        }
    }
    assert!(loads.values().all(|count| *count <= 65_535));
    for token in 0..offsets[offsets.len() - 1] {
        let b = sequence_of(token);
        let visible = batch.visible(desc, b, token - offsets[b]);
        for row in token * group..(token + 1) * group {
            let mut have = met.remove(&row).expect("a row without an item");
            have.sort_unstable();
            assert!(have.windows(2).all(|pair| pair[0].1 == pair[1].0), "a gap or an overlap: {have:?}");
            let ends = have.first().zip(have.last()).map(|(first, last)| first.0..last.1);
            assert_eq!(ends, (!visible.is_empty()).then_some(visible.clone()), "row {row} of sequence {b}");
        }
    }
    assert!(met.is_empty(), "items of rows that are not there: {met:?}");
    read
}

fn offsets_of(lens: &[u32]) -> Vec<u32> {
    std::iter::once(0)
        .chain(lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        }))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn coverage(
        lens in prop::collection::vec((0u32..200, 0u32..2000, -300i32..300), 0..6),
        group in 1u32..9,
        kv_heads in 1u32..4,
        causal: bool,
        left in prop::option::of(0u32..400),
        right in prop::option::of(0u32..400),
        explicit: bool,
        loop_limit in prop::option::of(2_000u32..70_000),
    ) {
        let runtime = emulated(wgpu::Features::empty(), (4, 4), CapsMask { loop_limit, ..CapsMask::default() });
        let desc = AttentionDesc {
            heads: group * kv_heads, kv_heads, head_dim: 8, causal, window: Window { left, right }, ..AttentionDesc::default()
        };
        let (q, rest): (Vec<u32>, Vec<(u32, i32)>) = lens.into_iter().map(|(q, kv, start)| (q, (kv, start))).unzip();
        let (kv, starts): (Vec<u32>, Vec<i32>) = rest.into_iter().unzip();
        let (q, kv) = (offsets_of(&q), offsets_of(&kv));
        let mut batch = Batch::new(&desc, Lengths::Ragged { offsets: &q }, Lengths::Ragged { offsets: &kv });
        batch.start = if explicit { Start::Explicit(&starts) } else { Start::BottomRight };
        check_coverage(&Attention::new(&runtime, &desc).unwrap(), &batch);
    }

    /// Pages, with prefixes that sequences share at several depths.
    #[test]
    fn coverage_of_pages_and_cascades(
        shape in prop::collection::vec((0u32..12, 0u32..2000, -30i32..300, 0usize..3, 0u32..1500), 1..12),
        page_len in prop::sample::select(vec![1u32, 3, 16, 64]),
        group in 1u32..9,
        causal: bool,
        right in prop::option::of(0u32..400),
        left in prop::option::of(0u32..3000),
        explicit: bool,
        loop_limit in prop::option::of(9_000u32..70_000),
    ) {
        let runtime = emulated(wgpu::Features::empty(), (4, 4), CapsMask { loop_limit, ..CapsMask::default() });
        let desc = AttentionDesc {
            heads: group, kv_heads: 1, head_dim: 8, causal, window: Window { left, right }, ..AttentionDesc::default()
        };
        let (mut offsets, mut pages, mut q_lens, mut kv_lens, mut starts) = (vec![0], Vec::<u32>::new(), vec![], vec![], vec![]);
        let mut before: Vec<u32> = Vec::new();
        let mut fresh = 0;
        for (q, kv, start, same, shared) in shape {
            let count = kv.div_ceil(page_len) as usize;
            let common = if same == 0 { 0 } else { (shared / page_len) as usize };
            let mut own: Vec<u32> = before.iter().copied().take(common.min(count)).collect();
            while own.len() < count {
                own.push(fresh);
                fresh += 1;
            }
            pages.extend(&own);
            offsets.push(pages.len() as u32);
            q_lens.push(q);
            kv_lens.push(kv);
            starts.push(kv as i32 - start);
            before = own;
        }
        let table = PageTable { page_len, offsets: &offsets, pages: &pages };
        let q = offsets_of(&q_lens);
        let mut batch = Batch::paged(&desc, Lengths::Ragged { offsets: &q }, &kv_lens, table);
        batch.start = if explicit { Start::Explicit(&starts) } else { Start::BottomRight };
        let attention = Attention::new(&runtime, &desc).unwrap();
        let flat = check_coverage(&attention, &Batch { cascade: Cascade::Never, ..batch });
        for cascade in [Cascade::Auto, Cascade::Always] {
            assert!(check_coverage(&attention, &Batch { cascade, ..batch }) <= flat);
        }
    }
}

/// What many sequences share is read once, level by level.
#[test]
fn cascades_read_shared_keys_once() {
    let desc = AttentionDesc { heads: 4, kv_heads: 1, head_dim: 8, causal: true, ..AttentionDesc::default() };
    let attention = Attention::new(&plain(), &desc).unwrap();
    // 16 sequences: 1024 keys that all share, 512 more that each half shares, 100 of its own.
    let table: Vec<Vec<u32>> = (0..16)
        .map(|b| {
            (0..64).chain((0..32).map(|i| 100 + 100 * (b / 8) + i)).chain((0..7).map(|i| 1000 + 10 * b + i)).collect()
        })
        .collect();
    let offsets = offsets_of(&table.iter().map(|pages| pages.len() as u32).collect::<Vec<_>>());
    let (q, kv) = (offsets_of(&[1; 16]), [1024 + 512 + 100; 16]);
    let pages = table.concat();
    let table = PageTable { page_len: 16, offsets: &offsets, pages: &pages };
    let batch = Batch { cascade: Cascade::Always, ..Batch::paged(&desc, Lengths::Ragged { offsets: &q }, &kv, table) };
    // All rows together fill a tile of 64; those of a half are cheaper in two tiles of 16 than in a half-empty one.
    let expected = 1024 + 2 * 2 * 512 + 16 * 100;
    assert_eq!(check_coverage(&attention, &batch), expected);
    assert_eq!(check_coverage(&attention, &Batch { cascade: Cascade::Never, ..batch }), 16 * 1636);
    let auto = Batch { cascade: Cascade::Auto, ..batch };
    assert_eq!(check_coverage(&attention, &auto), expected);
    // Where rows differ in what they see of the prefix, or a bias or mask may differ, nothing is shared.
    let flat = |desc: AttentionDesc| {
        let attention = Attention::new(&plain(), &desc).unwrap();
        let mask_layout = desc.mask.map(|_| ScoreLayout { key: 1, ..ScoreLayout::default() });
        let batch = Batch { mask_layout, bias_layout: mask_layout, ..batch };
        assert_eq!(
            check_coverage(&attention, &batch),
            check_coverage(&attention, &Batch { cascade: Cascade::Never, ..batch })
        );
    };
    flat(AttentionDesc { window: Window { left: Some(1500), right: None }, ..desc.clone() });
    flat(AttentionDesc { mask: Some(MaskKind::Bits), ..desc.clone() });
    flat(AttentionDesc { alibi: Some(vec![0.5; 4]), ..desc });
}

/// flash-attention 2662: 2²² keys, causal; and long prefills: planning is quick and stays in its bounds.
#[test]
fn large_plans() {
    let runtime = plain();
    let desc = AttentionDesc { heads: 8, kv_heads: 1, head_dim: 4, causal: true, ..AttentionDesc::default() };
    let attention = Attention::new(&runtime, &desc).unwrap();
    let uniform = |batch, len| Lengths::Uniform { batch, len };
    let items = attention.planned_items(&Batch::new(&desc, uniform(1, 100), uniform(1, 1 << 22))).unwrap();
    assert!(items.iter().all(|item| item.kv_end - item.kv_begin <= 1 << 16), "no workgroup runs for long");
    let desc = AttentionDesc { head_dim: 128, ..desc };
    let attention = Attention::new(&runtime, &desc).unwrap();
    let schedule = attention.schedule(&Batch::new(&desc, uniform(1, 1 << 14), uniform(1, 1 << 17))).unwrap();
    assert!(schedule.workspace_bytes() <= 128 << 20, "{}", schedule.workspace_bytes());
    assert!(schedule.dispatches() > 2, "several rounds, several dispatches");
}

/// A schedule for 256 decoding sequences: the plan itself, without making buffers.
#[test]
fn planning_is_cheap_and_deterministic() {
    let runtime = plain();
    let desc = AttentionDesc { heads: 32, kv_heads: 8, head_dim: 128, ..AttentionDesc::default() };
    let attention = Attention::new(&runtime, &desc).unwrap();
    let lens: Vec<u32> = (0..256).map(|i| 100 + i * 13 % 2000).collect();
    let kv = Lengths::Padded { max_len: 4096, lens: &lens };
    let batch = Batch::new(&desc, Lengths::Uniform { batch: 256, len: 1 }, kv);
    let first = attention.planned_items(&Batch {
        k_layout: Layout { batch: 0, ..batch.k_layout },
        v_layout: Layout { batch: 0, ..batch.v_layout },
        ..batch
    });
    let again = attention.planned_items(&Batch {
        k_layout: Layout { batch: 0, ..batch.k_layout },
        v_layout: Layout { batch: 0, ..batch.v_layout },
        ..batch
    });
    assert_eq!(first.unwrap(), again.unwrap());
}

/// Every row is listed with the reason why it is out.
#[test]
fn explanations() {
    let rows = attention::explain(&plain(), &AttentionDesc::default());
    assert_eq!(rows.len(), attention::variants().len());
    for (name, reason) in rows {
        assert_eq!(reason.is_none(), name.contains("portable"), "{name}: {reason:?}");
    }
}

/// Each sequence shares a page more with the next one than with the one before: as many levels as sequences, on a small stack.
#[test]
fn cascades_of_many_levels() {
    let desc = AttentionDesc { head_dim: 8, causal: true, ..AttentionDesc::default() };
    let attention = Attention::new(&plain(), &desc).unwrap();
    let count = 1000u32;
    let (mut pages, mut offsets) = (Vec::new(), vec![0]);
    for b in 0..count {
        pages.extend((0..=b).chain([count + b]));
        offsets.push(pages.len() as u32);
    }
    let lens: Vec<u32> = (1..=count).map(|pages| 256 * pages + 1).collect();
    let table = PageTable { page_len: 256, offsets: &offsets, pages: &pages };
    let rows = Lengths::Uniform { batch: count, len: 1 };
    let batch = Batch { cascade: Cascade::Always, ..Batch::paged(&desc, rows, &lens, table) };
    let items = std::thread::scope(|scope| {
        let plan = || attention.planned_items(&batch).unwrap().len();
        std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, plan).unwrap().join().unwrap()
    });
    assert!(items > count as usize);
}
