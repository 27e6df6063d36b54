//! What holds for every weight file and every layout, on random ones.
//!
//! The validator is held against the reference implementation: it reads back whatever that writes, never
//! panics on a damaged file, accepts nothing that the reference refuses, and refuses more only by its own
//! stricter rules. A layout loses and doubles no byte at any page size, piece size and compute type.
//!
//! proptest prints the failing case, shrunk, and its seed.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use vram_pager::weights::{
    Dtype, Extent, FileIdentity, FileSource, HeaderError, LayoutOptions, PageLayout, TENSOR_ALIGNMENT,
    TensorIndex, UnitId, WeightFile, validate,
};

/// A tensor to be: type, shape, a seed for its bytes.
type Spec = (Dtype, Vec<u64>, u8);

fn specs() -> impl Strategy<Value = BTreeMap<String, Spec>> {
    let name = prop_oneof![
        4 => "[a-c]\\.[0-9]\\.(weight|bias|scale)",
        1 => "[a-z.]{0,6}",
        1 => any::<String>().prop_filter("reserved", |name| name != "__metadata__"),
    ];
    let spec =
        (select(&Dtype::ALL[..]), vec(0_u64..6, 0..4), any::<u8>()).prop_map(|(dtype, mut shape, seed)| {
            if dtype.byte_size().is_none() {
                shape.push(4); // whole bytes: four of 6 bits are three, four of 4 bits two
            }
            (dtype, shape, seed)
        });
    btree_map(name, spec, 0..12)
}

fn data(spec: &Spec) -> Vec<u8> {
    let bits = spec.1.iter().product::<u64>() * spec.0.bits();
    (0..bits / 8).map(|at| spec.2.wrapping_add(at.to_le_bytes()[0])).collect()
}

/// The file that the reference writes for these tensors.
fn written(specs: &BTreeMap<String, Spec>) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = specs.values().map(data).collect();
    let views = specs.iter().zip(&bytes).map(|((name, (dtype, shape, _)), bytes)| {
        let dtype: safetensors::Dtype = serde_json::from_str(&format!("\"{dtype}\"")).unwrap();
        let shape = shape.iter().map(|&dimension| usize::try_from(dimension).unwrap()).collect();
        (name.clone(), TensorView::new(dtype, shape, bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Damage to a file; places are relative to what it is applied to.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, u8),
    Insert(Index, &'static str),
    Delete(Index, usize),
    Copy(Index, usize, Index),
    Replace(&'static str, &'static str, Index),
    Resize(isize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let token = select(
        &[
            " ",
            "\n",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "0",
            "1",
            "9",
            "-",
            ".",
            "e9",
            "null",
            "\\u0061",
            "\0",
            "\"x\":1,",
            "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
            "\"__metadata__\":{},",
            "\"__metadata__\":null,",
            "[[[[",
            "18446744073709551616",
        ][..],
    );
    let swap = select(
        &[
            ("U8", "I8"),
            ("F32", "I32"),
            ("F32", "F99"),
            ("dtype", "dtypes"),
            ("shape", "data_offsets"),
            ("0", "1"),
            ("[", "[1,"),
            ("]", ",1]"),
            ("{", "{ "),
            ("}", "} "),
            ("a", "b"),
            ("b", "a"),
            ("weight", "bias"),
        ][..],
    );
    let small = 1_usize..9;
    prop_oneof![
        any::<(Index, u8)>().prop_map(|(at, byte)| Damage::Flip(at, byte)),
        (any::<Index>(), token).prop_map(|(at, token)| Damage::Insert(at, token)),
        (any::<Index>(), small).prop_map(|(at, count)| Damage::Delete(at, count)),
        (any::<Index>(), 1_usize..80, any::<Index>()).prop_map(|(at, count, to)| Damage::Copy(at, count, to)),
        (swap, any::<Index>()).prop_map(|((from, to), which)| Damage::Replace(from, to, which)),
        (-3_isize..4).prop_map(Damage::Resize),
    ]
}

fn apply(damage: &Damage, bytes: &mut Vec<u8>) {
    match damage {
        Damage::Flip(at, byte) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Damage::Insert(at, token) => {
            let at = at.index(bytes.len() + 1);
            bytes.splice(at..at, token.bytes());
        }
        Damage::Delete(at, count) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes.drain(at..(at + count).min(bytes.len()));
        }
        Damage::Copy(at, count, to) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            let copied = bytes[at..(at + count).min(bytes.len())].to_vec();
            let to = to.index(bytes.len() + 1);
            bytes.splice(to..to, copied);
        }
        Damage::Replace(from, to, which) => {
            let found: Vec<_> =
                (0..bytes.len()).filter(|&at| bytes[at..].starts_with(from.as_bytes())).collect();
            if !found.is_empty() {
                let at = found[which.index(found.len())];
                bytes.splice(at..at + from.len(), to.bytes());
            }
        }
        Damage::Resize(by) => bytes.resize(bytes.len().saturating_add_signed(*by), 0),
        Damage::Flip(..) | Damage::Delete(..) | Damage::Copy(..) => {}
    }
}

/// The stricter rules that the `header` module documents.
fn is_stricter_rule(error: &HeaderError) -> bool {
    matches!(
        error,
        HeaderError::DuplicateTensor { .. }
            | HeaderError::LeadingSpace
            | HeaderError::UnknownField { .. }
            | HeaderError::EntryNotAnObject { .. }
    )
}

fn same_verdict(bytes: &[u8]) -> Result<(), TestCaseError> {
    match (validate(bytes), SafeTensors::deserialize(bytes)) {
        (Ok(header), Ok(reference)) => {
            prop_assert_eq!(header.tensors.len(), reference.len());
            for tensor in &header.tensors {
                let view = reference.tensor(&tensor.name).expect("the reference has it");
                let start = usize::try_from(tensor.offset).unwrap();
                let end = start + usize::try_from(tensor.bytes).unwrap();
                prop_assert_eq!(view.data(), &bytes[start..end]);
                prop_assert_eq!(view.data().as_ptr(), bytes[start..end].as_ptr());
                prop_assert_eq!(view.dtype().to_string(), tensor.dtype.name());
                let shape: Vec<u64> = view.shape().iter().map(|&dimension| dimension as u64).collect();
                prop_assert_eq!(&shape, &tensor.shape);
            }
        }
        (Err(error), Ok(_)) => prop_assert!(is_stricter_rule(&error), "only we refuse: {}", error),
        (Ok(_), Err(error)) => prop_assert!(false, "only we accept: {}", error),
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_the_reference_writes_reads_back_the_same(specs in specs()) {
        let bytes = written(&specs);
        let header = validate(&bytes).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(header.tensors.len(), specs.len());
        for tensor in &header.tensors {
            let spec = &specs[&tensor.name];
            prop_assert_eq!((tensor.dtype, &tensor.shape), (spec.0, &spec.1));
            let start = usize::try_from(tensor.offset).unwrap();
            prop_assert_eq!(&bytes[start..start + usize::try_from(tensor.bytes).unwrap()], data(spec));
        }
        same_verdict(&bytes)?;
    }

    #[test]
    fn a_damaged_header_gets_the_references_verdict(specs in specs(), damages in vec(damage(), 1..5)) {
        // The length and the data stay right, so that the damage reaches the JSON and not only the frame.
        let bytes = written(&specs);
        let length = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
        let mut json = bytes[8..8 + length].to_vec();
        for damage in &damages {
            apply(damage, &mut json);
        }
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json);
        file.extend(&bytes[8 + length..]);
        same_verdict(&file)?;
    }

    #[test]
    fn a_damaged_file_gets_the_references_verdict(specs in specs(), damages in vec(damage(), 1..5)) {
        let mut bytes = written(&specs);
        for damage in &damages {
            apply(damage, &mut bytes);
        }
        same_verdict(&bytes)?;
    }

    #[test]
    fn no_bytes_make_the_validator_panic(bytes in vec(any::<u8>(), 0..200), json in "[\\[\\]{}\",:0-9a-z ]{0,80}") {
        same_verdict(&bytes)?;
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json.bytes());
        same_verdict(&file)?;
    }
}

/// A file whose tensors' bytes are never read.
struct Unread {
    header: Vec<u8>,
    length: u64,
}

impl FileSource for Unread {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        for (at, byte) in (offset..).zip(buf.iter_mut()) {
            *byte = usize::try_from(at).ok().and_then(|at| self.header.get(at)).copied().unwrap_or(0);
        }
        Ok(buf.len())
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity { device: 0, inode: 0, length: self.length, modified: (0, 0), changed: (0, 0) })
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        self.identity()
    }
}

/// An index of tensors in this order, in one file without data.
fn index_of(tensors: &[(String, Dtype, Vec<u64>)]) -> Arc<TensorIndex> {
    let mut end = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let begin = end;
            end += shape.iter().product::<u64>() * dtype.bits() / 8;
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
        })
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.bytes());
    let length = header.len() as u64 + end;
    let file = WeightFile::from_source("unread", Box::new(Unread { header, length })).unwrap();
    Arc::new(TensorIndex::from_files(vec![file]).unwrap())
}

/// Models of units of every size: many small ones, some far beyond a page, tensors without bytes.
fn models() -> impl Strategy<Value = Vec<(String, Dtype, Vec<u64>)>> {
    let dimension = prop_oneof![1 => Just(0_u64), 2 => Just(1_u64), 8 => 1_u64..40, 4 => 40_u64..3000];
    let tensor =
        (0_usize..14, select(&Dtype::ALL[..]), vec(dimension, 0..3)).prop_map(|(unit, dtype, mut shape)| {
            if dtype.byte_size().is_none() {
                // Whole bytes; with a first dimension of odd rows that are not.
                if shape.len() > 1 && dtype == Dtype::F4 {
                    shape = vec![shape[0] * 2, 3];
                } else {
                    shape.push(4);
                }
            }
            (unit, dtype, shape)
        });
    vec(tensor, 0..30).prop_map(|tensors| {
        let name = |(at, (unit, dtype, shape))| (format!("unit{unit}.t{at}"), dtype, shape);
        tensors.into_iter().enumerate().map(name).collect()
    })
}

fn options() -> impl Strategy<Value = LayoutOptions> {
    let page = select(&[256_u64, 512, 768, 4096, 65_536, 2 << 20][..]);
    let piece = prop_oneof![1_u64..2000, 2000_u64..400_000, Just(u64::MAX)];
    let compute = select(&[None, Some(Dtype::BF16), Some(Dtype::F32), Some(Dtype::F16)][..]);
    (page, piece, compute).prop_map(|(page_bytes, piece_bytes, compute)| LayoutOptions {
        page_bytes,
        whole_bytes: 0,
        piece_bytes,
        compute,
    })
}

/// The bytes of each tensor that the extents of these runs cover: in the file and on the device, in order.
fn covered(
    layout: &PageLayout,
    runs: impl Iterator<Item = std::ops::Range<u64>>,
) -> BTreeMap<u32, Vec<Extent>> {
    let mut found: BTreeMap<u32, Vec<Extent>> = BTreeMap::new();
    for run in runs {
        for extent in layout.extents(run.clone()) {
            assert!(run.start <= extent.at && extent.at + extent.device_bytes <= run.end, "inside its run");
            assert!(extent.device_bytes > 0 && extent.file_bytes > 0);
            found.entry(extent.tensor.0).or_default().push(extent);
        }
    }
    found
}

fn covers_every_byte_once(
    index: &TensorIndex,
    layout: &PageLayout,
    found: &BTreeMap<u32, Vec<Extent>>,
) -> Result<(), TestCaseError> {
    for (id, tensor) in (0..).zip(index.tensors()) {
        let place = layout.tensor_at(vram_pager::weights::TensorId(id));
        let (mut at, mut offset) = (place.at, tensor.offset);
        for extent in found.get(&id).into_iter().flatten() {
            prop_assert_eq!((extent.at, extent.file_offset), (at, offset));
            prop_assert_eq!((extent.from, extent.to, extent.file), (tensor.dtype, place.dtype, tensor.file));
            if let (Some(from), Some(to)) = (extent.from.byte_size(), extent.to.byte_size()) {
                prop_assert_eq!(extent.file_bytes % from, 0);
                prop_assert_eq!(extent.device_bytes / to, extent.file_bytes / from);
            }
            at += extent.device_bytes;
            offset += extent.file_bytes;
        }
        prop_assert_eq!((at, offset), (place.at + place.bytes, tensor.offset + tensor.bytes));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tensors_are_aligned_and_never_overlap(model in models(), options in options()) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        let mut places: Vec<_> =
            (0..).take(model.len()).map(|id| layout.tensor_at(vram_pager::weights::TensorId(id))).collect();
        places.sort_by_key(|place| (place.at, place.bytes));
        for pair in places.windows(2) {
            prop_assert!(pair[0].at + pair[0].bytes <= pair[1].at);
        }
        for place in &places {
            prop_assert_eq!(place.at % TENSOR_ALIGNMENT, 0);
            prop_assert!(place.at + place.bytes <= layout.address_bytes());
        }
        prop_assert_eq!(places.iter().map(|place| place.bytes).sum::<u64>(), layout.total_bytes());
        if options.compute.is_none() {
            prop_assert_eq!(layout.total_bytes(), index.total_bytes());
        }
    }

    #[test]
    fn units_follow_one_another_and_nothing_is_lost_between_them(model in models(), options in options()) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        prop_assert_eq!(layout.units().len(), index.units().len());
        let mut end = 0;
        for (number, unit) in (0..).map(UnitId).zip(layout.units()) {
            prop_assert_eq!(unit.bytes.start, u64::next_multiple_of(end, TENSOR_ALIGNMENT));
            end = unit.bytes.end;
            prop_assert_eq!(layout.spans_of_unit(number), Some(unit.spans.clone()));
            prop_assert_eq!(layout.unit(number), unit);
        }
        prop_assert_eq!(u64::from(layout.page_count()), end.div_ceil(options.page_bytes));
        let behind = u32::try_from(layout.units().len()).unwrap();
        prop_assert_eq!(layout.spans_of_unit(UnitId(behind)), None);
    }

    #[test]
    fn an_address_is_found_in_the_unit_and_the_spans_that_lie_there(
        model in models(), options in options(), random in vec(any::<Index>(), 30),
    ) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        let (units, spans): (Vec<_>, Vec<_>) = (layout.units().collect(), layout.spans().collect());
        let borders = units.iter().flat_map(|unit| [unit.bytes.start, unit.bytes.end]);
        let end = usize::try_from(layout.address_bytes()).unwrap() + 300;
        let anywhere = random.iter().map(|random| random.index(end) as u64);
        for at in borders.flat_map(|border| [border.saturating_sub(1), border, border + 1]).chain(anywhere) {
            let expected = units.iter().rposition(|unit| unit.bytes.start <= at);
            prop_assert_eq!(layout.unit_at(at).map(UnitId::index), expected);
            let range = at..at + 700;
            let touching = layout.spans_in(range.clone());
            for (number, span) in (0..).zip(&spans) {
                let touches = span.bytes.start < range.end && span.bytes.end > range.start;
                prop_assert!(touching.contains(&number) == touches || span.bytes.is_empty());
            }
        }
    }

    #[test]
    fn spans_tile_their_unit_at_rows_and_keep_to_the_limit(model in models(), options in options()) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        let mut next_span = 0;
        let mut rows_seen = vec![0; model.len()];
        for (number, unit) in (0..).zip(layout.units()) {
            prop_assert_eq!(unit.spans.start, next_span);
            prop_assert!(!unit.spans.is_empty());
            next_span = unit.spans.end;
            let spans: Vec<_> = unit.spans.clone().map(|span| layout.span(span)).collect();
            let mut at = unit.bytes.start;
            for (place, span) in (unit.spans.start..).zip(&spans) {
                prop_assert_eq!(span.unit.0, number);
                prop_assert_eq!(span.bytes.start, at);
                at = span.bytes.end;
                let parts: Vec<_> = layout.parts_of(place).collect();
                prop_assert!(!parts.is_empty());
                prop_assert_eq!(parts[0].at, span.bytes.start);
                for part in &parts {
                    let (place, info) = (layout.tensor_at(part.tensor), index.tensor_info(part.tensor));
                    let rows = info.shape.first().copied().unwrap_or(1);
                    let seen = &mut rows_seen[part.tensor.index()];
                    prop_assert_eq!(part.rows.start, *seen);
                    *seen = part.rows.end;
                    let row_at = |row: u64| if row == rows { place.bytes } else { place.bytes / rows * row };
                    prop_assert_eq!(part.at, place.at + row_at(part.rows.start));
                    prop_assert_eq!(part.bytes, row_at(part.rows.end) - row_at(part.rows.start));
                    prop_assert!(part.at + part.bytes <= span.bytes.end);
                    if part.rows != (0..rows) {
                        prop_assert_eq!(place.bytes % rows, 0);
                    }
                }
                let bytes = span.bytes.end - span.bytes.start;
                if bytes > options.piece_bytes {
                    // Only what cannot be cut may exceed the limit: one part, of one row or of a tensor
                    // whose rows are not whole bytes; its padding does not count.
                    let with_bytes: Vec<_> = parts.iter().filter(|part| part.bytes > 0).collect();
                    prop_assert_eq!(with_bytes.len(), 1);
                    let info = index.tensor_info(with_bytes[0].tensor);
                    let rows = info.shape.first().copied().unwrap_or(1);
                    let whole = layout.tensor_at(with_bytes[0].tensor).bytes;
                    let row = whole / rows;
                    prop_assert!(
                        !whole.is_multiple_of(rows) || bytes < row.max(options.piece_bytes) + TENSOR_ALIGNMENT,
                        "{} bytes, limit {}", bytes, options.piece_bytes
                    );
                }
                let pages = layout.page_bytes();
                let expected =
                    if bytes == 0 { None } else { Some((span.bytes.start / pages, span.bytes.end.div_ceil(pages))) };
                let given = (!span.pages.is_empty()).then(|| (u64::from(span.pages.start), u64::from(span.pages.end)));
                prop_assert_eq!(given, expected);
            }
            prop_assert_eq!(at, unit.bytes.end);
            if unit.bytes.end - unit.bytes.start <= options.piece_bytes {
                prop_assert_eq!(spans.len(), 1);
            }
        }
        prop_assert_eq!(next_span as usize, layout.spans().len());
        for (seen, (_, _, shape)) in rows_seen.iter().zip(&model) {
            prop_assert_eq!(*seen, shape.first().copied().unwrap_or(1));
        }
    }

    #[test]
    fn extents_cover_every_byte_once_by_page_by_span_and_by_any_cut(
        model in models(), options in options(), step in 1_u64..5000,
    ) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        let pages = (0..layout.page_count()).map(|page| layout.page_range(page));
        covers_every_byte_once(&index, &layout, &covered(&layout, pages))?;
        let spans = layout.spans().map(|span| span.bytes);
        covers_every_byte_once(&index, &layout, &covered(&layout, spans))?;
        let whole = std::iter::once(0..layout.address_bytes());
        let found = covered(&layout, whole);
        prop_assert!(found.values().all(|extents| extents.len() == 1));
        covers_every_byte_once(&index, &layout, &found)?;

        // Cuts inside elements: the run that holds the first byte has the element.
        let mut found: BTreeMap<u32, Vec<Extent>> = BTreeMap::new();
        let step = step.max(layout.address_bytes() / 5000);
        for start in (0..layout.address_bytes()).step_by(usize::try_from(step).unwrap()) {
            for extent in layout.extents(start..start + step) {
                prop_assert!((start..start + step).contains(&extent.at));
                found.entry(extent.tensor.0).or_default().push(extent);
            }
        }
        covers_every_byte_once(&index, &layout, &found)?;
    }

    #[test]
    fn a_page_knows_its_spans_and_its_content(model in models(), options in options()) {
        let index = index_of(&model);
        let layout = PageLayout::new(&index, &options).unwrap();
        let mut content = 0;
        for page in 0..layout.page_count() {
            let range = layout.page_range(page);
            let of_page = layout.spans_of_page(page);
            for (number, span) in (0..).zip(layout.spans()) {
                if span.pages.contains(&page) {
                    prop_assert!(of_page.contains(&number));
                } else if of_page.contains(&number) {
                    prop_assert!(span.bytes.is_empty());
                }
            }
            let bytes: u64 = layout.extents(range).map(|extent| extent.device_bytes).sum();
            prop_assert_eq!(layout.content_bytes_of_page(page), bytes);
            content += bytes;
            if page > 2000 {
                return Ok(()); // enough of one case
            }
        }
        prop_assert_eq!(content, layout.total_bytes());
    }
}

#[test]
fn half_a_million_pages_need_no_memory_of_their_own() {
    // Mixtral's shape: 32 layers of 8 experts with three matrices each, 2 bytes an element.
    let mut tensors = Vec::new();
    for layer in 0..32 {
        for expert in 0..8 {
            for matrix in 1..4 {
                tensors.push((
                    format!("l.{layer}.e.{expert}.w{matrix}.weight"),
                    Dtype::BF16,
                    vec![14_336, 4096],
                ));
            }
        }
    }
    let index = index_of(&tensors);
    let options =
        LayoutOptions { piece_bytes: 16 << 20, compute: Some(Dtype::F32), ..LayoutOptions::new(128 << 10) };
    let layout = PageLayout::new(&index, &options).unwrap();
    assert!(layout.page_count() > 500_000, "{}", layout.page_count());
    let content: u64 = (0..layout.page_count()).map(|page| layout.content_bytes_of_page(page)).sum();
    assert_eq!(content, 768 * 14_336 * 4096 * 4);
    let touched: usize = (0..layout.page_count()).map(|page| layout.spans_of_page(page).len()).sum();
    assert!(touched >= 500_000);
}

#[test]
fn options_that_cannot_be_met_are_refused() {
    let index = index_of(&[("a.w".to_owned(), Dtype::F8_E4M3, vec![1 << 40])]);
    let refused = |page_bytes, piece_bytes, compute| {
        let options = LayoutOptions { page_bytes, whole_bytes: 0, piece_bytes, compute };
        PageLayout::new(&index, &options).unwrap_err().to_string()
    };
    assert!(refused(0, 1, None).contains("0 bytes"));
    assert!(refused(300, 1, None).contains("300"));
    assert!(refused(4096, 0, None).contains("pieces"));
    assert!(refused(4096, 1, Some(Dtype::I32)).contains("I32"));
    assert!(refused(4096, 1, Some(Dtype::F4)).contains("F4"));
    assert!(refused(256, u64::MAX, None).contains("pages"));
    let huge: Vec<_> = (0..5).map(|at| (format!("a.w{at}"), Dtype::F8_E4M3, vec![1 << 60])).collect();
    let huge = index_of(&huge);
    let options = LayoutOptions { compute: Some(Dtype::F32), ..LayoutOptions::new(2 << 20) };
    assert!(PageLayout::new(&huge, &options).unwrap_err().to_string().contains("2^64"));
}
