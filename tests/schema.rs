//! The published schemas and the parsers accept the same files.

mod common;
mod damage;

use std::path::Path;

use damage::{Random, damage, seeds};
use dplan::import::graph_json::{FUNCTIONS, OPS};
use dplan::import::{self, ImportOptions};
use dplan::schema;
use serde_json::Value;

#[test]
fn examples_and_real_configs_are_valid() {
    let schema = parse(schema::MODEL);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut files = vec![root.join("two-branch.json"), root.join("experts.json"), root.join("llama-1m/config.json")];
    if let Some(shared) = common::shared() {
        let names = ["gpt2", "gpt3-175b", "llama-3.1-405b", "mistral-7b-instruct-v0.3", "qwen2.5-7b-instruct", "qwen3-0.6b", "mixtral-8x7b"];
        files.extend(names.iter().map(|n| shared.join(format!("models/{n}.json"))));
        files.extend(["gpt2", "llama", "llama-tied", "mixtral"].map(|n| shared.join(format!("oracle/{n}/config.json"))));
    }
    for file in files {
        let value = parse(&std::fs::read_to_string(&file).unwrap());
        assert_eq!(fault(&schema, &schema, &value), None, "{}", file.display());
    }
}

/// A schema cannot say all that a parser checks, but it must not refuse what the parser takes; and it must refuse something.
#[test]
fn what_the_parser_takes_the_schema_takes() {
    let schema = parse(schema::MODEL);
    let seeds = seeds();
    let (mut taken, mut refused) = (0, 0);
    for case in 0..6000u64 {
        let mut random = Random(case ^ 0x5ce_a5e);
        let mut text = seeds[random.below(seeds.len())].clone().into_bytes();
        damage(&mut text, &mut random);
        // NaN and its like are no JSON for a schema.
        let Ok(value) = serde_json::from_slice::<Value>(&text) else { continue };
        let valid = fault(&schema, &schema, &value);
        match import::model_from_bytes("m.json", &text, &ImportOptions::default()) {
            Ok(_) => {
                taken += 1;
                assert_eq!(valid, None, "case {case}: {}", String::from_utf8_lossy(&text));
            }
            Err(_) => refused += usize::from(valid.is_some()),
        }
    }
    assert!(taken > 500 && refused > 500, "{taken} taken, {refused} refused by both");
}

#[test]
fn every_op_and_function_of_the_parser_is_in_the_schema() {
    let schema = parse(schema::MODEL);
    let nodes = schema.pointer("/anyOf/0/properties/nodes/items/oneOf").and_then(Value::as_array).unwrap();
    for (name, attributes) in OPS.iter().chain([&("cross_entropy", &[][..])]) {
        let node = nodes.iter().find(|n| n["title"] == *name).unwrap_or_else(|| panic!("{name}"));
        let mut keys: Vec<&str> =
            node["properties"].as_object().unwrap().keys().map(String::as_str).filter(|k| !["name", "op", "in", "layer"].contains(k)).collect();
        let mut expected = attributes.to_vec();
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(keys, expected, "{name}");
    }
    assert_eq!(nodes.len(), OPS.len() + 1);
    let functions: Vec<&str> = FUNCTIONS.iter().map(|(name, _)| *name).collect();
    assert_eq!(schema["$defs"]["function"]["enum"], serde_json::json!(functions));
}

#[test]
fn schemas_say_what_is_wrong_and_know_only_keywords_that_are_checked_here() {
    for text in [schema::MODEL, schema::CLUSTER, schema::PLAN] {
        let schema = parse(text);
        assert!(fault(&schema, &schema, &Value::Array(Vec::new())).is_some());
    }
    let cluster = parse(schema::CLUSTER);
    let check = |text: &str| fault(&cluster, &cluster, &parse(text));
    assert_eq!(check(r#"{"device": "h100", "per_node": 8, "nodes": 16}"#), None);
    assert!(check(r#"{"device": "h100", "per_node": 0, "nodes": 16}"#).is_some_and(|f| f.contains("per_node")));
    assert!(check(r#"{"device": "h100", "per_node": 8, "nodes": 16, "intra": {"latency_nanoseconds": 1}}"#).is_some_and(|f| f.contains("intra")));
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The first fault of `value` under `schema`, with its path: the keywords that the schemas use, and no others.
fn fault(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let inside = |place: String, schema: &Value, value: &Value| fault(root, schema, value).map(|f| format!("{place}{f}"));
    for (keyword, rule) in schema.as_object().unwrap() {
        let number = |f: fn(f64, f64) -> bool| value.as_f64().is_none_or(|v| f(v, rule.as_f64().unwrap()));
        let length = |n: Option<usize>, f: fn(u64, u64) -> bool| n.is_none_or(|n| f(n as u64, rule.as_u64().unwrap()));
        let (array, object, string) = (value.as_array(), value.as_object(), value.as_str());
        let found = match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" | "default" | "pattern" => None,
            "$ref" => inside(String::new(), root.pointer(rule.as_str().unwrap().strip_prefix('#').unwrap()).unwrap(), value),
            "type" => {
                let kinds = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                let is = |kind: &Value| match kind.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "number" => value.is_number(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    other => panic!("type {other}"),
                };
                (!kinds.iter().any(is)).then(|| format!(": is no {rule}"))
            }
            "const" => (value != rule).then(|| format!(": is not {rule}")),
            "enum" => (!rule.as_array().unwrap().contains(value)).then(|| format!(": is none of {rule}")),
            "anyOf" | "oneOf" => {
                let faults: Vec<String> = rule.as_array().unwrap().iter().filter_map(|s| fault(root, s, value)).collect();
                let matches = rule.as_array().unwrap().len() - faults.len();
                let sound = if keyword == "oneOf" { matches == 1 } else { matches > 0 };
                (!sound).then(|| format!(": {matches} of {keyword}: {}", faults.join(" | ")))
            }
            "properties" => rule.as_object().unwrap().iter().find_map(|(key, s)| object?.get(key).and_then(|v| inside(format!(".{key}"), s, v))),
            "required" => rule
                .as_array()
                .unwrap()
                .iter()
                .find(|k| object.is_some_and(|o| !o.contains_key(k.as_str().unwrap())))
                .map(|k| format!(": has no {k}")),
            "additionalProperties" => {
                let known = |key: &str| schema.get("properties").is_some_and(|p| p.get(key).is_some());
                object.into_iter().flatten().filter(|(key, _)| !known(key)).find_map(|(key, v)| match rule {
                    Value::Bool(false) => Some(format!(": has {key}")),
                    _ => inside(format!(".{key}"), rule, v),
                })
            }
            "items" => array.into_iter().flatten().enumerate().find_map(|(i, v)| inside(format!("[{i}]"), rule, v)),
            "minimum" => (!number(|v, r| v >= r)).then(|| format!(": is under {rule}")),
            "maximum" => (!number(|v, r| v <= r)).then(|| format!(": is over {rule}")),
            "exclusiveMinimum" => (!number(|v, r| v > r)).then(|| format!(": is not over {rule}")),
            "multipleOf" => (!number(|v, r| v % r == 0.0)).then(|| format!(": is no multiple of {rule}")),
            "minItems" => (!length(array.map(Vec::len), |n, r| n >= r)).then(|| format!(": has fewer than {rule}")),
            "maxItems" => (!length(array.map(Vec::len), |n, r| n <= r)).then(|| format!(": has more than {rule}")),
            "minLength" => (!length(string.map(str::len), |n, r| n >= r)).then(|| ": is empty".to_string()),
            "maxLength" => (!length(string.map(str::len), |n, r| n <= r)).then(|| ": is too long".to_string()),
            other => panic!("the schema uses {other}, which this test does not know"),
        };
        if found.is_some() {
            return found;
        }
    }
    None
}
