package testkit

import "strconv"

// Number returns the number that an id is, or 0.
func Number[ID ~string](id ID) int {
	n, _ := strconv.Atoi(string(id))
	return n
}
