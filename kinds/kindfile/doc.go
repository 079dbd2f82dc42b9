// Package kindfile reads the file of `tidings kinds apply`, which is YAML (docs/kinds.md). It is
// for the commands, and for subscribers of installations with kinds of their own. It is a package
// of its own, so that other programs link no parser of YAML. It is supported: CHANGELOG.md names
// every change that a program of yours would notice.
package kindfile
