//! Completion of names in the shell.
//!
//! A shell asks by running kibo with [`VARIABLE`] set and the words of the line; kubectl asks by running
//! `kubectl_complete-kibo`. What an option or argument takes is told by the name of its value, so that a new verb
//! completes what it calls `WORKSPACE` without further words. Whatever goes wrong, and what takes too long, gives
//! no candidates: somebody is typing.

mod candidates;
mod words;

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt::Write as _,
    io::Write as _,
    path::Path,
    sync::Arc,
};

use clap::{Command, CommandFactory as _, ValueHint};
use clap_complete::{
    ArgValueCompleter, Shell,
    engine::{CompletionCandidate, complete},
    env::{CompleteEnv, Shells},
};

use self::{candidates::Kind, words::Words};
use crate::{
    cli::Cli,
    errors::{Error, Result},
    output,
};

/// Set by the scripts of [`script`]; its value is the shell.
const VARIABLE: &str = "KIBO_COMPLETE";

/// The program by which kubectl completes its plugins.
const OF_PLUGIN: &str = "kubectl_complete-kibo";

/// The script that makes a shell ask.
pub fn script(shell: Shell) -> Result<()> {
    let shells = Shells::builtins();
    let name = shell.to_string();
    let completer = shells.completer(&name).ok_or_else(|| Error::invalid(format!("no completions for {name}")))?;
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, "kibo", "kibo", &own_path(), &mut script)?;
    output::print(&String::from_utf8_lossy(&script))
}

/// How the script finds this program again: by the search path, or where it is.
fn own_path() -> String {
    let called = env::args_os().next().unwrap_or_default();
    if Path::new(&called).components().count() == 1 {
        return called.to_string_lossy().into_owned();
    }
    let path = env::current_exe().unwrap_or_else(|_| called.into());
    path.to_string_lossy().into_owned()
}

/// Answers a shell that asks, and says whether one did.
pub fn answer() -> bool {
    let args: Vec<OsString> = env::args_os().collect();
    if args.first().is_some_and(|path| Path::new(path).file_stem() == Some(OsStr::new(OF_PLUGIN))) {
        answer_kubectl(&args[1..]);
        return true;
    }
    if env::var_os(VARIABLE).is_none() {
        return false;
    }
    let line = args.iter().skip_while(|arg| *arg != "--").skip(1).cloned().collect();
    let index = env::var("_CLAP_COMPLETE_INDEX").ok().and_then(|index| index.parse().ok());
    let words = Arc::new(Words::new(line, index));
    let here = env::current_dir().ok();
    let asked = CompleteEnv::with_factory(|| command(&words)).var(VARIABLE).try_complete(args, here.as_deref());
    // A line that cannot be completed is no error of somebody who is still typing it.
    asked.unwrap_or(true)
}

/// One candidate on a line, and at the end what kubectl is to do with them.
fn answer_kubectl(args: &[OsString]) {
    /// No file names besides; and no blank after a candidate that is to be continued.
    const NO_FILES: u8 = 4;
    const NO_SPACE: u8 = 2;
    let mut line = vec![OsString::from("kibo")];
    line.extend_from_slice(args);
    let index = line.len() - 1;
    let words = Arc::new(Words::new(line.clone(), Some(index)));
    let here = env::current_dir().ok();
    let found = complete(&mut command(&words), line, index, here.as_deref()).unwrap_or_default();
    let to_be_continued = |it: &CompletionCandidate| it.get_value().to_string_lossy().ends_with([':', '/', '=']);
    let directive = NO_FILES | if found.iter().any(to_be_continued) { NO_SPACE } else { 0 };
    let mut text = String::new();
    for candidate in &found {
        let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.lines().next().filter(|help| !help.is_empty()).map(|help| format!("\t{help}"));
        let _ = writeln!(text, "{}{}", candidate.get_value().to_string_lossy(), help.unwrap_or_default());
    }
    let _ = std::io::stdout().write_all(format!("{text}:{directive}\n").as_bytes());
}

/// The command line with a completer for each value that is a name.
fn command(words: &Arc<Words>) -> Command {
    with_names(Cli::command().bin_name("kibo"), words)
}

fn with_names(command: Command, words: &Arc<Words>) -> Command {
    // Options are offered to who asks for them, since there are many: candidates that are hidden are shown only
    // where there is nothing else.
    let wants_options = words.current().starts_with('-');
    let command = command.mut_args(|arg| {
        let arg = if arg.is_positional() { arg } else { arg.hide(!wants_options) };
        let name = arg.get_value_names().and_then(|names| names.first()).map(|name| name.as_str().to_owned());
        match name.as_deref() {
            Some("FILE") => arg.value_hint(ValueHint::FilePath),
            Some(name) => match Kind::of(name) {
                Some(kind) => {
                    let words = words.clone();
                    arg.add(ArgValueCompleter::new(move |current: &OsStr| candidates::find(kind, current, &words)))
                }
                None => arg,
            },
            None => arg,
        }
    });
    // Those that clap adds by itself cannot be hidden, only left out.
    let command = command.disable_help_flag(!wants_options).disable_version_flag(!wants_options);
    command.mut_subcommands(|sub| with_names(sub, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(line: &[&str]) -> Vec<String> {
        let line: Vec<OsString> = [&["kibo"], line].concat().into_iter().map(OsString::from).collect();
        let words = Arc::new(Words::new(line.clone(), None));
        let index = line.len() - 1;
        let found = complete(&mut command(&words), line, index, None).unwrap();
        found.iter().map(|it| it.get_value().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn verbs_are_completed_and_options_only_when_asked_for() {
        assert_eq!(offered(&["template", "l"]), ["list"]);
        assert!(offered(&["template", ""]).iter().all(|word| !word.starts_with('-')));
        assert!(offered(&["template", "create", "--me"]).contains(&"--memory".to_owned()));
        assert_eq!(offered(&["workspace", "start", "dev", "--when-unplaceable", "w"]), ["wait"]);
    }

    /// What is a name is told by the name of the value: no verb that takes one may be without.
    #[test]
    fn every_verb_on_an_object_completes_its_names() {
        let words = Arc::new(Words::new(vec!["kibo".into(), String::new().into()], None));
        let mut root = command(&words);
        root.build();
        for noun in root.get_subcommands().filter(|noun| noun.has_subcommands()) {
            for verb in noun.get_subcommands() {
                if ["get", "start", "stop", "delete", "exec", "logs", "wait", "shell", "cp", "port-forward"]
                    .contains(&verb.get_name())
                {
                    let first = verb.get_positionals().next().expect("it takes a name");
                    let line = format!("{} {}", noun.get_name(), verb.get_name());
                    assert!(first.get::<ArgValueCompleter>().is_some(), "{line}");
                }
            }
        }
    }
}
