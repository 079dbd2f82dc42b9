package words_test

import (
	"testing"

	"github.com/tidings/tidings/internal/words"
)

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		words.Count(0):                        "0",
		words.Count(999):                      "999",
		words.Count(-999):                     "-999",
		words.Count(1000):                     "1,000",
		words.Count(-1234567):                 "-1,234,567",
		words.Of(1, "message"):                "1 message",
		words.Of(0, "message"):                "0 messages",
		words.Of(12000, "dead letter"):        "12,000 dead letters",
		words.Capped(10000, true):             "more than 10,000",
		words.Capped(7, false):                "7",
		words.Seconds(0):                      "0.0 s",
		words.Seconds(59.9):                   "59.9 s",
		words.Seconds(59.97):                  "1m0s",
		words.Seconds(3632.4):                 "1h0m32s",
		words.Ranges(nil):                     "",
		words.Ranges([]int{4}):                "4",
		words.Ranges([]int{0, 1, 2, 5, 7, 8}): "0-2 5 7-8",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
