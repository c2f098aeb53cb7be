//! The line that is being typed.

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser};

use crate::client::Global;

/// The words of the line, from the program's name on.
#[derive(Debug)]
pub struct Words {
    words: Vec<String>,
    /// The word that is completed, perhaps one behind the last.
    index: usize,
}

/// The options of every command by themselves.
#[derive(Parser, Debug)]
struct Globals {
    #[command(flatten)]
    global: Global,
}

impl Words {
    /// Without an index it is the last word that is completed.
    pub fn new(line: Vec<OsString>, index: Option<usize>) -> Self {
        let words: Vec<_> = line.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let index = index.unwrap_or(words.len().saturating_sub(1));
        Self { words, index }
    }

    /// What was typed of the word that is completed.
    pub fn current(&self) -> &str {
        self.words.get(self.index).map_or("", String::as_str)
    }

    /// Whether another word of the line is this.
    pub fn has(&self, word: &str) -> bool {
        self.words.iter().enumerate().any(|(i, known)| i != self.index && known == word)
    }

    /// The options of every command, wherever they stand; the rest of the line need not be right yet. What of them
    /// is not understood is as if it were not there.
    pub fn globals(&self) -> Global {
        let read = |line: Vec<String>| Globals::try_parse_from(line).map(|globals| globals.global);
        read(self.picked()).unwrap_or_else(|_| read(vec!["kibo".to_owned()]).expect("no option is required"))
    }

    fn picked(&self) -> Vec<String> {
        let command = Globals::command();
        let takes_value = |word: &str| {
            let mut options = command.get_arguments();
            options.any(|option| {
                option.get_long().is_some_and(|long| word == format!("--{long}"))
                    || option.get_short().is_some_and(|short| word == format!("-{short}"))
            })
        };
        let mut picked = vec!["kibo".to_owned()];
        // What stands behind -- is of another program.
        let before = self.words.iter().enumerate().take_while(|(_, word)| *word != "--");
        let mut words = before.filter(|(i, _)| *i != self.index).map(|(_, word)| word).skip(1);
        while let Some(word) = words.next() {
            if takes_value(word) {
                picked.extend([word.clone()].into_iter().chain(words.next().cloned()));
            } else if word.split_once('=').is_some_and(|(option, _)| takes_value(option)) {
                picked.push(word.clone());
            }
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str, index: Option<usize>) -> Words {
        Words::new(line.split(' ').map(OsString::from).collect(), index)
    }

    fn namespace(line: &str, index: Option<usize>) -> Option<String> {
        words(line, index).globals().namespace
    }

    #[test]
    fn the_options_of_the_line_are_found_wherever_they_stand() {
        assert_eq!(namespace("kibo -n team workspace get ", None).as_deref(), Some("team"));
        assert_eq!(namespace("kibo workspace start --cpu many --namespace=team d", None).as_deref(), Some("team"));
        assert_eq!(namespace("kibo workspace get  -n team", Some(3)).as_deref(), Some("team"), "behind the cursor");
        assert_eq!(namespace("kibo workspace get ", None), None);
        assert_eq!(namespace("kibo workspace exec dev -- -n team", None), None, "of another program");
    }

    #[test]
    fn a_line_that_is_not_right_yet_has_the_usual_options() {
        assert_eq!(namespace("kibo workspace get -n te", None), None, "what is being typed is not said yet");
        assert_eq!(namespace("kibo --timeout soon -n team workspace get ", None), None);
    }

    #[test]
    fn the_word_that_is_typed_is_told_from_the_others() {
        let words = words("kibo workspace delete a b", None);
        assert_eq!(words.current(), "b");
        assert!(words.has("a") && !words.has("b"));
        assert_eq!(Words::new(vec!["kibo".into()], Some(1)).current(), "");
    }
}
