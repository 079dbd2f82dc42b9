// Package words writes numbers for people, the same way wherever people read them.
package words

import (
	"fmt"
	"strings"
)

// Count writes n with its thousands apart.
func Count(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Of writes n with its noun, which takes an s where n is not 1: "1 message", "2,000 messages".
func Of(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return Count(n) + " " + noun + "s"
}

// Capped writes a count that may have stopped at n because there is more.
func Capped(n int64, more bool) string {
	if more {
		return "more than " + Count(n)
	}
	return Count(n)
}

// Ranges writes sorted numbers with runs drawn together: 0-3 7 9-31.
func Ranges(numbers []int) string {
	var all []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		if i == j {
			all = append(all, fmt.Sprint(numbers[i]))
		} else {
			all = append(all, fmt.Sprintf("%d-%d", numbers[i], numbers[j]))
		}
		i = j + 1
	}
	return strings.Join(all, " ")
}
