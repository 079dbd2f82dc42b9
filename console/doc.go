// Package console is the operators' web console under /console/: pages made by html/template and htmx, in the binary, without a build step.
//
// It promises: every write is a POST that a person confirmed, with a reason, done once, and on record (package audit); a tenant's token sees its tenant
// alone; a session ends with its token; nothing runs in the browser that this package did not serve. It holds no SQL and no rule of the domain: it reads
// and acts through the packages that the commands use.
//
//	browser ── cookie ──▶ session ──▶ page: data ──▶ templates/NAME.html ("main", "live")
//	                         │          └── hub: once a second, for those who look ──▶ /console/live/NAME (SSE)
//	                         └────────▶ act: look ─▶ confirm ─▶ audit.Begin ─▶ do ─▶ audit.Finish
//
// # Add a page
//
//  1. A file NAME.go with `func (c *Console) nameData(ctx context.Context, v *view) (any, error)`. It reads v.query("from"), v.tenant() and what Deps have,
//     and returns what the template shows. A missing thing is errNotFound, a bad query a *inputError. Lists page by keyset: return rows and the URL of the next page, v.with("before", last).
//  2. templates/NAME.html with {{define "main"}} and, for a live page, {{define "live"}}, which "main" includes by {{template "livebox" .}}. The data is .Data.
//     Components are in templates/parts.html ({{template "badge" (dict ...)}}, "stat", "pager", "empty", "act", "copy", "payload"); functions in funcs.go.
//  3. One line in pages (pages.go). Tests: `page(t, h.reader, "/console/name")` in NAME_test.go; a line in browserPages (browser_test.go), which
//     opens it in both sizes, light and dark, without JavaScript, and through axe-core; a line in eight.pages (isolation_test.go). Without these two the tests fail.
//
// # Add an act
//
// One entry in acts (pages.go): its name in the audit log, label, role, `look` (verify the input, say what it is done to and what happens) and `do`. A page
// offers it with {{template "act" (dict "F" $ "Act" "consumer.pause" "In" (values "consumer" .Name))}}, which shows nothing to those who may not. The
// confirmation form, the reason, the act id, the audit record, progress (doing.progress), a secret shown once (doing.showOnce) and the page of its outcome come by themselves.
// Tests: a case in sampleActs (acts_browser_test.go), which clicks, and a line in eight.forms (isolation_test.go). Without them the tests fail.
// A bulk act works in pages of its own and calls progress; its ctx ends when the process stops.
package console
