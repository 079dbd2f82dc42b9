package store

import "testing"

func TestAttributesFromTheDatabaseHaveOneForm(t *testing.T) {
	for in, want := range map[string]string{
		`{"stars": 5, "length": 9007199254740993, "a<b": "<&>"}`: `{"a<b":"<&>","length":9007199254740993,"stars":5}`,
		`{}`:  `{}`,
		``:    ``,
		`[1]`: `[1]`, // input that is not attributes from jsonb is returned unchanged
	} {
		if got := string(CanonicalAttributes([]byte(in))); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
