package kinds

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/tidings/tidings/event"
)

// Object is an object that edges and children are about.
type Object struct {
	Plural string `yaml:"plural,omitempty" json:"plural"`
	ID     IDForm `yaml:"id,omitempty" json:"id"`
}

// IDForm is the form of the ids of an object: String, Integer or UUID. The zero value is String. A
// value is safe for concurrent use.
type IDForm string

// UUID is the form of ids that are UUIDs in lower case with hyphens. String is every id that
// event.ParseID reads, and Integer a decimal number from 1 to 2^63-1 without leading zeros.
const UUID = "uuid"

// ParseID reads an id of this form. The error quotes the text and states the rule.
func (f IDForm) ParseID(text string) (event.ID, error) {
	id, err := event.ParseID(text)
	if err == nil && !f.fits(text) {
		err = fmt.Errorf("%q is not an id: %s", text, f.Rule())
	}
	if err != nil {
		return "", err
	}
	return id, nil
}

func (f IDForm) fits(text string) bool {
	switch f {
	case Integer:
		_, err := event.ParseNumber(text)
		return err == nil
	case UUID:
		return event.IsUUID(text)
	}
	return true
}

// Rule describes the form in words.
func (f IDForm) Rule() string {
	switch f {
	case Integer:
		return "a decimal number from 1 to 9223372036854775807, without leading zeros"
	case UUID:
		return "a UUID in lower case with hyphens"
	}
	return "a number, a UUID or other text of at most 128 of the characters A-Z a-z 0-9 - _ . ~ : @ | + ="
}

// Pattern returns a regular expression for contracts. Every id of the form matches it; so do a few
// other texts, such as the number 2^63.
func (f IDForm) Pattern() string {
	switch f {
	case Integer:
		return "^[1-9][0-9]{0,18}$"
	case UUID:
		return "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"
	}
	return "^[A-Za-z0-9._~:@|+=-]{1,128}$"
}

// object is an Object without its methods.
type object Object

// form returns the object as files and the database have it: as its plural, unless its ids are
// narrowed.
func (o Object) form() any {
	if o.ID == "" || o.ID == String {
		return o.Plural
	}
	return object(o)
}

// MarshalJSON encodes the object as a file has it.
func (o Object) MarshalJSON() ([]byte, error) { return json.Marshal(o.form()) }

// MarshalYAML encodes the object as a file has it.
func (o Object) MarshalYAML() (any, error) { return o.form(), nil }

// UnmarshalJSON reads a plural, or an object with members.
func (o *Object) UnmarshalJSON(text []byte) error {
	if bytes.HasPrefix(text, []byte(`"`)) {
		return json.Unmarshal(text, &o.Plural)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode((*object)(o))
}

// UnmarshalYAML reads a plural, or an object with members.
func (o *Object) UnmarshalYAML(decode func(any) error) error {
	if decode(&o.Plural) == nil {
		return nil
	}
	return decode((*object)(o))
}
