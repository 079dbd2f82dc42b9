// Package console is the operators' web console under /console/. The API's binary contains its
// pages (html/template and htmx), so it needs no build step. It is for the API's process, which
// serves it to operators. It may change in any release.
//
// It promises:
//   - Every write is a POST that a person confirmed with a reason. It happens once, and package
//     audit records it.
//   - A tenant's token sees its own tenant only, and a session ends with its token.
//   - The browser runs only files that this package serves.
//
// It contains no SQL and no rule of the domain: it reads and acts through the packages that the
// commands use.
//
//	browser ── cookie ──▶ session ──▶ page: data ──▶ templates/NAME.html ("main", "live")
//	                         │          └── hub: once a second, while somebody watches ──▶ /console/live/NAME (SSE)
//	                         └────────▶ act: prepare ─▶ confirm ─▶ audit.Begin ─▶ do ─▶ audit.Finish
//
// # Add a page
//
//  1. Write NAME.go with `func (c *Console) nameData(ctx context.Context, v *view) (any, error)`.
//     It reads v.query("from"), v.tenant() and Deps, and returns the template's data. Return
//     errNotFound for a missing object and an *inputError for an invalid query. Lists page by
//     keyset: return the rows and the URL of the next page, v.with("before", last).
//  2. Write templates/NAME.html with {{define "main"}}. A live page also has {{define "live"}}, and
//     its "main" includes {{template "livebox" .}}; if it is live for some queries only, its entry in
//     pages has follows. The data is .Data. templates/parts.html has the
//     components ({{template "badge" (dict ...)}}, "stat", "pager", "empty", "act", "copy",
//     "payload"), and funcs.go the functions.
//  3. Add one line to pages (pages.go).
//  4. Test it with `page(t, h.reader, "/console/name")` in NAME_test.go. Add a line to browserPages
//     (browser_test.go): that test opens the page in both sizes, light and dark, without
//     JavaScript, and checks it with axe-core. Add a line to eight.pages (isolation_test.go). The
//     tests fail without these two lines.
//
// # Add an act
//
//  1. Add one entry to acts (pages.go): the act's name in the audit log, its label and role, `prepare`
//     and `do`. prepare verifies the input and describes the target and the effect. do acts.
//  2. Offer it on a page with {{template "act" (dict "F" $ "Act" "consumer.pause" "In" (values
//     "consumer" .Name))}}. Only readers who may do the act see the button.
//  3. Add a case to sampleActs (acts_browser_test.go), which clicks the button, and a line to
//     eight.forms (isolation_test.go). The tests fail without them.
//
// The console adds the confirmation form, the reason, the act id, the audit record and the page of
// the outcome. An act may report its progress (doing.progress) and show a secret once
// (doing.showOnce). An act on many rows works in slices and calls progress after each. Its ctx ends
// when the process stops.
package console
