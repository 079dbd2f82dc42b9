package kinds_test

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/tidings/tidings/kinds"
)

// A kind of edges from users to places, beside the built-in ones. Package kindfile reads the same
// from the file of `tidings kinds apply`.
func ExampleSet_Extend() {
	all, err := kinds.Builtin().Extend(&kinds.Set{
		Objects: map[string]kinds.Object{"place": {Plural: "places"}},
		Edges: map[string]kinds.Edge{"visit": {Plural: "visits", From: "user", To: "place", Forward: "visits", Reverse: "visitors",
			Attributes: map[string]kinds.Attribute{"how": {Enum: []any{"car", "train"}}}}},
	}, nil)
	if err != nil {
		panic(err)
	}
	visit, ok := all.Edge("visit")
	fmt.Println(visit.Name, "leads from a", visit.From, "to a", visit.To, ok)
	fmt.Println(all.Has("follow"), kinds.Builtin().Has("visit"))
	// Output:
	// visit leads from a user to a place true
	// true false
}

func ExampleEdge_Check() {
	membership, _ := kinds.Builtin().Edge("membership")
	attributes, err := membership.Check(json.RawMessage(`{}`))
	fmt.Println(string(attributes), err)
	_, err = membership.Check(json.RawMessage(`{"role": "king"}`))
	if refused, ok := errors.AsType[*kinds.AttributeError](err); ok {
		fmt.Println(refused.Fields[0].Pointer, refused.Fields[0].Detail)
	}
	// Output:
	// {"role":"member"} <nil>
	// /role expected value to be one of "member, moderator, owner"
}
