// Package doctor holds the rules by which an installation is healthy. A Finding is a present or a
// coming problem with its remedy. `tidings doctor`, the notes of `tidings status`, and the console
// show the same findings. It is for operators' commands and for the console. It may change in any
// release.
//
//	status.State ──> Fleet: rules about the state ──┐
//	servers ───────> Probe: rules that ask them ────┼─> Rank ──> root causes first
package doctor
