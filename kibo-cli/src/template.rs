//! `kibo template`: what Workspaces are made from. Templates are cluster-wide and never change.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use kibo_crds::{
    CpuQuantity, MemoryQuantity, SizeQuantity, Template,
    template::{Entrypoint, RestartPolicy, TemplateLayer, TemplateResources, TemplateSpec},
};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde::Serialize;

use crate::{
    cli::pair,
    client::{Cluster, Listed, Paging},
    errors::{On as _, Result, Subject},
    manifest,
    output::{
        OutputArgs, Page, Present, Table, present, print, remark,
        words::{age, enum_word, when},
    },
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Create a Template from options or from a manifest
    Create(Box<Create>),
    /// Show one Template
    Get {
        #[arg(value_name = "TEMPLATE")]
        name: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List Templates
    #[command(alias = "ls")]
    List {
        #[command(flatten)]
        paging: Paging,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Delete Templates; Workspaces that were made from them keep running, but cannot start again
    #[command(alias = "rm")]
    Delete {
        #[arg(required = true, value_name = "TEMPLATE")]
        names: Vec<String>,
    },
}

#[derive(Args, Debug)]
pub struct Create {
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    name: Option<String>,
    /// Read the Template from a manifest instead (- for standard input)
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["image", "cpu", "memory", "layer_size", "env", "working_dir", "restart", "command"])]
    file: Option<PathBuf>,
    /// Root image, as the nodes name it
    #[arg(long, value_name = "IMAGE", required_unless_present = "file")]
    image: Option<String>,
    /// CPU of a Workspace that names none, in cores or millicores
    #[arg(long, default_value = "1")]
    cpu: CpuQuantity,
    /// Memory of a Workspace that names none
    #[arg(long, default_value = "512Mi")]
    memory: MemoryQuantity,
    /// Size of the writable layer of a Workspace that names none
    #[arg(long, default_value = "1Gi", value_name = "SIZE")]
    layer_size: SizeQuantity,
    /// Environment of the entrypoint; can be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair, requires = "command")]
    env: Vec<(String, String)>,
    /// Working directory of the entrypoint
    #[arg(long, value_name = "DIR", requires = "command")]
    working_dir: Option<String>,
    /// When the entrypoint is started again
    #[arg(long, value_enum, value_name = "WHEN", requires = "command")]
    restart: Option<Restart>,
    /// The entrypoint: a program and its arguments, not run through a shell
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Restart {
    Never,
    OnFailure,
    Always,
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::Create(args) => create(cluster, *args).await,
        Command::Get { name, output } => {
            let template = cluster.cluster_wide::<Template>().get(&name).await.on(&subject(&name))?;
            present(output.form(), &One { template, now: Cluster::now() })
        }
        Command::List { paging, output } => {
            let api = cluster.cluster_wide::<Template>();
            let listed = paging.list(&api, ListParams::default(), &subject("")).await?;
            if listed.items.is_empty() {
                remark(&format!(
                    "no Templates yet; make one: {} template create debian-12 --image debian-12",
                    crate::errors::program()
                ));
            }
            present(output.form(), &Many { listed, now: Cluster::now() })
        }
        Command::Delete { names } => {
            for name in names {
                cluster
                    .cluster_wide::<Template>()
                    .delete(&name, &DeleteParams::default())
                    .await
                    .map(|_| ())
                    .on(&subject(&name))?;
                print(&format!("{} deleted\n", subject(&name)))?;
            }
            Ok(())
        }
    }
}

fn subject(name: &str) -> Subject {
    Subject::cluster("Template", name)
}

async fn create(cluster: &Cluster, args: Create) -> Result<()> {
    let form = args.output.form();
    let template = match &args.file {
        Some(file) => manifest::read(file)?,
        None => built(args),
    };
    let subject = subject(&template.name_any());
    let template = cluster.cluster_wide::<Template>().create(&PostParams::default(), &template).await.on(&subject)?;
    if matches!(form, crate::output::Form::Text { .. }) {
        return print(&format!("{subject} created\n"));
    }
    present(form, &One { template, now: Cluster::now() })
}

fn built(args: Create) -> Template {
    let restart = match args.restart {
        Some(Restart::Never) => RestartPolicy::Never,
        Some(Restart::OnFailure) => RestartPolicy::OnFailure,
        Some(Restart::Always) | None => RestartPolicy::Always,
    };
    let entrypoint = (!args.command.is_empty()).then(|| Entrypoint {
        command: args.command,
        env: args.env.into_iter().collect(),
        working_dir: args.working_dir,
        restart,
    });
    let spec = TemplateSpec {
        root_image: args.image.unwrap_or_default(),
        resources: TemplateResources { cpu: args.cpu, memory: args.memory },
        writable_layer: TemplateLayer { size: args.layer_size },
        entrypoint,
    };
    Template::new(&args.name.unwrap_or_default(), spec)
}

/// A Template in JSON.
#[derive(Serialize)]
struct View {
    name: String,
    root_image: String,
    cpu: String,
    memory: String,
    writable_layer_size: String,
    entrypoint: Option<EntrypointView>,
    created_at: Option<String>,
}

#[derive(Serialize)]
struct EntrypointView {
    command: Vec<String>,
    env: std::collections::BTreeMap<String, String>,
    working_dir: Option<String>,
    restart: String,
}

impl From<&Template> for View {
    fn from(template: &Template) -> Self {
        let spec = &template.spec;
        Self {
            name: template.name_any(),
            root_image: spec.root_image.clone(),
            cpu: spec.resources.cpu.to_string(),
            memory: spec.resources.memory.to_string(),
            writable_layer_size: spec.writable_layer.size.to_string(),
            entrypoint: spec.entrypoint.as_ref().map(|entrypoint| EntrypointView {
                command: entrypoint.command.clone(),
                env: entrypoint.env.clone(),
                working_dir: entrypoint.working_dir.clone(),
                restart: enum_word(&entrypoint.restart),
            }),
            created_at: template.creation_timestamp().as_ref().map(crate::output::words::instant),
        }
    }
}

struct One {
    template: Template,
    now: Timestamp,
}

impl Present for One {
    fn view(&self) -> impl Serialize {
        View::from(&self.template)
    }

    fn names(&self) -> Vec<String> {
        vec![self.template.name_any()]
    }

    fn text(&self, wide: bool) -> String {
        let spec = &self.template.spec;
        let mut page = Page::default();
        page.fact("Name", self.template.name_any());
        page.fact("Root image", &spec.root_image);
        page.fact("CPU", spec.resources.cpu.to_string());
        page.fact("Memory", spec.resources.memory.to_string());
        page.fact("Writable layer", spec.writable_layer.size.to_string());
        if let Some(entrypoint) = &spec.entrypoint {
            page.fact("Entrypoint", shell_words(&entrypoint.command));
            page.fact_if("Directory", entrypoint.working_dir.clone());
            let env: Vec<_> = entrypoint.env.iter().map(|(key, value)| format!("{key}={value}")).collect();
            page.fact_if("Environment", (!env.is_empty()).then(|| env.join("\n")));
            page.fact("Restart", enum_word(&entrypoint.restart));
        } else {
            page.fact("Entrypoint", "");
        }
        page.fact("Created", when(self.template.creation_timestamp().as_ref(), self.now, wide));
        page.render()
    }
}

/// A command line that a shell would read as these words.
pub fn shell_words(words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    let quoted = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

struct Many {
    listed: Listed<Template>,
    now: Timestamp,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("templates", View::from)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["NAME", "ROOT_IMAGE", "CPU", "MEMORY", "LAYER", "AGE"]);
        if wide {
            table = table.columns(["RESTART", "ENTRYPOINT"]);
        }
        for template in &self.listed.items {
            let spec = &template.spec;
            let mut row = vec![
                template.name_any(),
                spec.root_image.clone(),
                spec.resources.cpu.to_string(),
                spec.resources.memory.to_string(),
                spec.writable_layer.size.to_string(),
                age(template.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                let entrypoint = spec.entrypoint.as_ref();
                row.push(entrypoint.map(|e| enum_word(&e.restart)).unwrap_or_default());
                row.push(entrypoint.map(|e| shell_words(&e.command).replace('\n', " ")).unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    fn parsed(args: &[&str]) -> Create {
        let line = [&["kibo", "template", "create"], args].concat();
        match Cli::try_parse_from(line).unwrap().command {
            crate::cli::Command::Template(Command::Create(create)) => *create,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_make_a_template() {
        let template = built(parsed(&[
            "t",
            "--image",
            "debian-12",
            "--cpu",
            "500m",
            "--env",
            "A=b",
            "--restart",
            "never",
            "--",
            "sh",
            "-c",
            "echo $A",
        ]));
        let expected: Template = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "t" },
            "spec": {
                "rootImage": "debian-12",
                "resources": { "cpu": "500m", "memory": "512Mi" },
                "writableLayer": { "size": "1Gi" },
                "entrypoint": { "command": ["sh", "-c", "echo $A"], "env": { "A": "b" }, "restart": "Never" },
            },
        }))
        .unwrap();
        assert_eq!(template, expected);
    }

    #[test]
    fn a_manifest_excludes_options() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["kibo", "template", "create"], args].concat()).is_ok();
        assert!(parse(&["-f", "t.yaml"]));
        assert!(!parse(&["-f", "t.yaml", "--image", "x"]) && !parse(&["t"]) && !parse(&["t", "-f", "t.yaml"]));
    }

    #[test]
    fn a_command_is_shown_as_a_shell_would_read_it() {
        let words = ["sh", "-c", "echo 'hi'", ""].map(str::to_owned);
        assert_eq!(shell_words(&words), r"sh -c 'echo '\''hi'\''' ''");
    }

    #[test]
    fn the_table_of_templates() {
        let template = built(parsed(&["debian-12", "--image", "debian-12", "--", "sleep", "infinity"]));
        let many = Many { listed: Listed { items: vec![template], next_page_token: None }, now: Timestamp::UNIX_EPOCH };
        let expected = "\
NAME        ROOT_IMAGE   CPU   MEMORY   LAYER   AGE   RESTART   ENTRYPOINT
debian-12   debian-12    1     512Mi    1Gi     -     ALWAYS    sleep infinity
";
        assert_eq!(many.text(true), expected);
    }
}
