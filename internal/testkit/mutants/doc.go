// Package mutants has the list of the system's mutants: the system without one guard each, and the
// test that must fail then. mutants.txt is the list and says its format; the command mutate builds
// and runs them. It is for those who run `make mutants`.
package mutants
