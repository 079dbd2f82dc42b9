// Package words formats numbers, counts and durations for people, in one way in every output. It is
// for operators' commands and for the console.
package words
