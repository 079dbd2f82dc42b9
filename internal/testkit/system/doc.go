// Package system runs parts of Tidings in a test's process: relays and consumers between a private
// database and a private broker. It is for tests of packages above relay and consumers; those two
// have rigs of their own.
package system
