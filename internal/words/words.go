package words

import (
	"fmt"
	"strings"
	"time"
)

// Count formats n with a comma between thousands: "1,234".
func Count(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Of formats n with its noun, which takes an s where n is not 1: "1 message", "2,000 messages".
func Of(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return Count(n) + " " + noun + "s"
}

// Capped formats a count that stopped at n. If more is true, more than n exist.
func Capped(n int64, more bool) string {
	if more {
		return "more than " + Count(n)
	}
	return Count(n)
}

// Seconds formats s seconds: tenths of a second below a minute ("0.3 s"), else hours, minutes and
// seconds ("1h0m32s").
func Seconds(s float64) string {
	if s < 59.95 {
		return fmt.Sprintf("%.1f s", s)
	}
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}

// Partitions names partitions by their sorted numbers: "partition 3", "partitions 0-2 5".
func Partitions(numbers []int) string {
	if len(numbers) == 1 {
		return "partition " + Ranges(numbers)
	}
	return "partitions " + Ranges(numbers)
}

// Ranges formats sorted numbers, and joins consecutive ones: "0-3 7 9-31".
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
