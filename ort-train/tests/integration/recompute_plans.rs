//! The memory optimizer as it is configured by names: what the table says, what counts count, what
//! is refused.

use crate::support::{Recording, given};
use ort_core::{ErrorKind, Result};
use ort_train::{
    ActivationPattern, PatternOption, PlanRequest, PlanRow, Recompute, RecomputeReport, Strategy, Trainer,
    TrainingOptions, memory_insight, memory_table,
};

const SIZES: [(&str, i64); 2] = [("batch", 4), ("sequence", 12)];

fn trainer(recording: &Recording, plans: &str) -> Result<Trainer> {
    let recompute = Recompute::Plans(PlanRequest::parse_list(plans)?);
    Trainer::new(&recording.model, TrainingOptions { recompute, ..recording.options() })
}

fn report(recording: &Recording, plans: &str) -> Result<RecomputeReport> {
    trainer(recording, plans)?.optimize_memory(&SIZES)
}

fn rows(recording: &Recording) -> Result<Vec<PlanRow>> {
    Trainer::new(&recording.model, recording.options())?.recompute_plans(&SIZES)
}

#[test]
fn savings_of_the_table_are_those_of_plans() -> Result<()> {
    for name in ["bert", "gpt"] {
        let recording = Recording::load(name);
        let table = rows(&recording)?;
        println!("{}", memory_table(&Recompute::AsLimited, &table));
        assert!(table.iter().any(|row| row.max_saving > 0), "{name}: nothing saves anything");
        assert!(table.iter().any(|row| row.frequency > 1), "{name}: no subgraph is there twice");
        assert_eq!(table, rows(&recording)?, "{name}: another table");
        for row in table.iter().filter(|row| row.max_saving > 0) {
            let report = report(&recording, &row.to_string())?;
            let saved = (report.peak_before - report.peak) as f64;
            let off = (saved - row.max_saving as f64).abs() / report.peak_before as f64;
            assert!(off < 0.05, "{name}: {row} saves {saved}, the table says {}", row.max_saving);
        }
    }
    Ok(())
}

#[test]
fn counts_count() -> Result<()> {
    let recording = Recording::load("bert");
    let table = rows(&recording)?;
    let often = table.iter().filter(|row| row.frequency > 1).max_by_key(|row| row.max_saving).unwrap();
    let values =
        |count: &str| report(&recording, &format!("{}:1:{count}", often.cluster)).map(|report| report.values);
    let (all, one, none) = (values("-1")?, values("1")?, values("0")?);
    assert_eq!(none, 0);
    assert!(one > 0 && one < all, "{one} values of {all} with a count of 1");
    assert_eq!(values(&often.frequency.to_string())?, all);
    let twice = format!("{0}:1:-1,{0}:0:-1", often.cluster);
    assert_eq!(report(&recording, &twice)?.values, 0, "the last entry counts");
    Ok(())
}

#[test]
fn the_same_bits_with_every_plan() -> Result<()> {
    let recording = Recording::load("gpt");
    let losses = |trainer: &mut Trainer| {
        let step = |step| trainer.train_step(&given(&recording.batch(step))).map(f32::to_bits);
        (0..3).map(step).collect::<Result<Vec<u32>>>()
    };
    let expected = losses(&mut Trainer::new(&recording.model, recording.options())?)?;
    for row in rows(&recording)? {
        assert_eq!(losses(&mut trainer(&recording, &row.to_string())?)?, expected, "{row}");
    }
    Ok(())
}

#[test]
fn mistakes_are_named() -> Result<()> {
    let recording = Recording::load("bert");
    let table = rows(&recording)?;
    let known = &table.first().unwrap().cluster;
    let problem = report(&recording, &format!("{known}X+:1:-1")).unwrap_err();
    assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
    assert!(problem.to_string().contains(known.as_str()), "{problem}");
    for (text, part) in [
        ("Gelu+:1", "2 parts"),
        ("Gelu+:3:-1", "strategy '3'"),
        ("Gelu+:1:x", "not an integer"),
        ("Gelu+:1:-2", "count -2"),
    ] {
        let problem = PlanRequest::parse_list(text).unwrap_err().to_string();
        assert!(problem.contains(part), "{problem}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mem_opt.json");
    std::fs::write(&file, "[\"Gelu+:1:-1\", \"Cast+:2:-1,Dropout+:1:2\"]").unwrap();
    let requests = PlanRequest::read(&file)?;
    let strategies: Vec<Strategy> = requests.iter().map(|request| request.strategy).collect();
    assert_eq!(strategies, [Strategy::Recompute, Strategy::Compromised, Strategy::Recompute]);
    for text in ["{}", "Gelu+:1:-1", "[\"Gelu+:1\"]"] {
        std::fs::write(&file, text).unwrap();
        let problem = PlanRequest::read(&file).unwrap_err();
        assert!(problem.to_string().contains("mem_opt.json"), "{problem}");
    }
    Ok(())
}

#[test]
fn patterns_tell_what_each_node_keeps() -> Result<()> {
    let recording = Recording::load("bert");
    let mut plain = Trainer::new(&recording.model, recording.options())?;
    let (table, patterns) = (plain.recompute_plans(&SIZES)?, plain.activation_patterns(&SIZES)?);
    let count = |row: &PlanRow,
                 number: fn(&ActivationPattern, &PatternOption) -> usize,
                 all: &[ActivationPattern]| {
        let options = all.iter().flat_map(|pattern| pattern.options.iter().map(move |it| (pattern, it)));
        let own = options.filter(|(_, it)| it.cluster == row.cluster && it.strategy == row.strategy);
        own.map(|(pattern, option)| number(pattern, option)).sum::<usize>()
    };
    for row in &table {
        assert_eq!(count(row, |pattern, _| pattern.frequency, &patterns), row.frequency, "{row}");
        assert_eq!(count(row, |_, option| option.applied, &patterns), 0, "{row}");
    }
    let often = table.iter().find(|row| row.frequency > 1).unwrap();
    let entry = format!("{}:1:1", often.cluster);
    let mut once = trainer(&recording, &entry)?;
    let patterns = once.activation_patterns(&SIZES)?;
    assert_eq!(count(often, |_, option| option.applied, &patterns), 1, "{entry}");
    let text = memory_insight(&Recompute::Plans(PlanRequest::parse_list(&entry)?), Some(&entry), &patterns);
    assert!(text.contains("Enabled, requested count=1, actual applied count=1"), "{text}");
    assert!(text.contains(&format!("User config file path: {entry}")), "{text}");
    Ok(())
}
