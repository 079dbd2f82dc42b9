// Package catalog keeps the kinds of an installation in its databases. It is for everyone who
// serves or changes them: the API, the projections and the commands. It may change in any release.
//
//	Apply ──▶ truth and projections: the tables of each kind, and the stored kinds ──▶ Catalog.Now, in every process
package catalog
