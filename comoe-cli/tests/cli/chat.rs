//! `comoe chat` with turns from a pipe.

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::{Run, comoe, model, run_with};

fn chat(turns: &str, extra: &[&str]) -> Run {
    let mut command = comoe();
    command.arg("chat").arg(model()).args(["--temperature", "0", "--max-tokens", "12"]).args(extra);
    run_with(&mut command, turns.as_bytes())
}

fn lines(run: &Run) -> Vec<&str> {
    run.answer().lines().collect()
}

#[test]
fn every_line_is_a_turn_and_every_answer_ends_its_line() {
    let run = chat("hello\n\n   \nhow are you?\r\nlast, without newline", &[]);
    let answers = lines(&run);
    assert_eq!(answers.len(), 3);
    assert!(run.answer().ends_with('\n'));
    assert!(
        answers.iter().all(|a| a.len() == 12 && a.bytes().all(|b| b.is_ascii_lowercase())),
        "{answers:?}"
    );
    assert!(!run.stderr.contains("> "), "no prompt without a person: {}", run.stderr);
    assert_eq!(lines(&chat("", &[])), Vec::<&str>::new());
}

#[test]
fn a_conversation_is_remembered_until_it_is_reset() {
    let run = chat("hello\nhello\n/reset\nhello\n", &["--json"]);
    let turns: Vec<serde_json::Value> =
        lines(&run).iter().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(turns.len(), 3);
    let prompt = |i: usize| turns[i]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(1) > prompt(0) + 12);
    assert!(turns[1]["reused_tokens"].as_u64().unwrap() >= prompt(0), "{}", turns[1]);
    assert_eq!(turns[2]["prompt_tokens"], turns[0]["prompt_tokens"]);
    assert_eq!(turns[2]["tokens"], turns[0]["tokens"]);
}

#[test]
fn commands_are_not_said() {
    let run = chat("/help\n/stats\n/dance\nhello\n/stats\n/quit\nnever said\n", &["--quiet"]);
    assert_eq!(lines(&run).len(), 1);
    for text in ["/reset", "/dance is no command", "slots", "% of 0 accesses"] {
        assert!(run.stderr.contains(text), "{text}: {}", run.stderr);
    }
    assert_eq!(run.stderr.matches("accesses").count(), 2);
    // With a space ahead it is text.
    assert_eq!(lines(&chat(" /quit\nhello\n", &[])).len(), 2);
}

#[test]
fn turns_that_no_longer_fit_are_dropped_aloud() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes { context: 128, ..Sizes::default() }).write(folder.path());
    let mut command = comoe();
    command.arg("chat").arg(folder.path()).args(["--temperature=0", "--max-tokens=16"]);
    let run = run_with(&mut command, "say something nice\n".repeat(6).as_bytes());
    assert_eq!(lines(&run).len(), 6);
    assert!(run.stderr.contains("the oldest turn was dropped"), "{}", run.stderr);
}

/// A talk that outgrows the context it was planned for takes the experts' slots, and a reset gives them back.
#[test]
fn a_talk_that_outgrows_its_plan_takes_slots_and_gives_them_back() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes { intermediate: 256, ..Sizes::default() }).write(folder.path());
    let chat = |extra: &[&str], text: &str| {
        let mut command = comoe();
        command.arg("chat").arg(folder.path()).args(["--temperature=0", "--max-tokens=16"]).args(extra);
        run_with(&mut command, text.as_bytes())
    };
    let talk = "say something nice\n".repeat(4);
    let grown = chat(&["--context=64", "--slots=23"], &format!("{talk}/stats\n/reset\n/stats\n"));
    let whole = chat(&[], &talk);
    assert_eq!(grown.answer(), whole.answer());
    assert!(!whole.stderr.contains("resized") && !whole.stderr.contains("the context grew"));
    assert!(grown.stderr.contains("note: the context grew from 64 to "), "{}", grown.stderr);
    assert!(grown.stderr.contains("slots of 23 left"), "{}", grown.stderr);
    let resized: Vec<&str> = grown.stderr.lines().filter(|l| l.starts_with("resized")).collect();
    assert!(resized.len() == 2 && !resized[0].contains(" 23 slots now"), "{resized:?}");
    assert!(resized[1].contains(" 23 slots now") && resized[1].contains("23 at most"), "{resized:?}");
    // With a limit of one's own, turns leave instead.
    let limited = chat(&["--context=64", "--context-limit=64"], &talk);
    assert!(limited.stderr.contains("the oldest turn was dropped"), "{}", limited.stderr);
}

/// A smaller budget takes slots, a larger one gives them back, and the talk goes on as if nothing had been.
#[test]
fn memory_can_be_taken_and_given_back_while_it_talks() {
    let chat = |text: &str, extra: &[&str]| {
        let mut command = comoe();
        command.args(["chat", "--temperature=0", "--max-tokens=16"]).args(extra);
        run_with(&mut command, text.as_bytes())
    };
    let turns = ["hello", "what is 17 plus 25?", "tell me a story"];
    let whole = chat(&turns.join("\n"), &[]);
    let [a, b, c] = turns;
    let text = format!("{a}\n/vram 18M\n{b}\n/vram 1M\n/vram\n/vram much\n{c}\n/vram 24M\n/stats\n");
    let talk = chat(&text, &["--vram=24M"]);
    assert_eq!(talk.answer(), whole.answer());
    let slots: Vec<usize> = talk
        .stderr
        .lines()
        .filter(|l| l.contains(" in all"))
        .map(|l| l.split(' ').next().unwrap().parse().unwrap())
        .collect();
    let &[smaller, least, back] = &slots[..] else { panic!("{}", talk.stderr) };
    assert!(least == 12 && least < smaller && smaller < back, "{slots:?}");
    assert!(talk.stderr.contains("12 slots of"), "{}", talk.stderr);
    assert!(talk.stderr.contains("the fewest that work: more than asked"), "{}", talk.stderr);
    for bad in ["error: /vram : ", "error: /vram much: "] {
        assert!(talk.stderr.contains(bad), "{bad}: {}", talk.stderr);
    }
    assert!(talk.stderr.contains("resized"), "{}", talk.stderr);
}

#[test]
fn raw_turns_continue_one_text() {
    let run = chat("abc\ndef\n", &["--raw", "--json"]);
    let turns: Vec<serde_json::Value> =
        lines(&run).iter().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(turns[0]["prompt_tokens"], 3);
    assert_eq!(turns[1]["prompt_tokens"], 3 + 12 + 3);
}

/// A model whose prompts open a thought that its answers, which are letters only, never close.
pub(crate) fn thinker() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes::default()).write(folder.path());
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n";
    let config = serde_json::json!({"chat_template": template}).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    folder
}

#[test]
fn thoughts_are_marked_or_left_out() {
    let thinker = thinker();
    let generate = |extra: &[&str]| {
        let args = ["-p=hello", "--temperature=0", "--max-tokens=12", "--quiet"];
        crate::program::generate(thinker.path(), &[&args, extra].concat())
    };
    let json = generate(&["--json"]).json();
    let thought = json["thought"].as_str().unwrap();
    assert_eq!((thought.len(), &json["text"]), (12, &"".into()));
    assert_eq!(generate(&[]).answer(), format!("<think>\n{thought}\n</think>\n\n"));
    assert_eq!(generate(&["--think=hide"]).answer(), "");
    let hidden = generate(&["--think=hide", "--json"]).json();
    assert_eq!((hidden.get("thought"), &hidden["tokens"]), (None, &json["tokens"]));
    // What was thought is not said again: the second prompt has no letter of it.
    let mut command = comoe();
    command.arg("chat").arg(thinker.path()).args(["--temperature=0", "--max-tokens=12", "--json"]);
    let turns = run_with(&mut command, b"a\nb\n");
    let prompts: Vec<u64> = lines(&turns)
        .iter()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["prompt_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(prompts[1] - prompts[0], ("assistant: \n".len() + "user: b\n".len()) as u64);
    // A text without a template has no thoughts.
    assert!(generate(&["--raw", "--json"]).json().get("thought").is_none());
}

#[test]
fn instructions_come_first() {
    let tokens = |run: Run| {
        serde_json::from_slice::<serde_json::Value>(&run.stdout).unwrap()["prompt_tokens"].as_u64()
    };
    let plain = tokens(chat("hello\n", &["--json"])).unwrap();
    let instructed = tokens(chat("hello\n", &["--json", "--system", "Be kind."])).unwrap();
    assert_eq!(instructed, plain + 3 + ("system\n".len() + "Be kind.".len()) as u64);
}
