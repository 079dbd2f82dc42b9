package api

func wordsOfFollows() kindWords {
	const nobody = "Reads a projection. An unknown user has an empty list."
	return kindWords{
		operations: map[string]words{
			"put":    {"follow", "Make one user follow another", "201 when that changed something, 200 when they did already; then there is no event."},
			"get":    {"get-follow", "Read a follow", "Reads the truth. 404 if the first user does not follow the second, whether or not they did before."},
			"remove": {"unfollow", "Make one user follow another no more", "204 also when they did not; then there is no event."},
			"batch":  {"batch-follows", "Follow and unfollow up to 1000 times", ""},
			"check": {"check-follows", "Ask of up to 500 pairs whether the one follows the other",
				"Answers for both directions. Reads a projection. Users follow neither unknown users nor themselves."},
			"reverse": {"list-followers", "List who follows a user, newest first", nobody},
			"forward": {"list-following", "List whom a user follows, newest first", nobody},
			"counts":  {"get-counts", "Count a user's followers and followings", "Reads a projection. An unknown user counts 0."},
			"versions": {"list-follow-versions", "List the versions of a follow, newest first",
				"Who followed and unfollowed, and when. An unknown pair has none." + fromTheHistory},
		},
		schemas: map[string]string{"Pair": "Pair", "CheckInputBody": "CheckInputBody", "Relation": "Relation", "RelationList": "RelationList",
			"EdgeList": "EdgeList", "Counts": "Counts"},
		names: map[string]string{"active": "following", "reversed": "followed_by", "put": "follow", "remove": "unfollow"},
		texts: map[string]string{"put 200": "The first user followed the second already.", "outcome": "The pair, after a follow.", "following": "follower_id follows followee_id.", "followed_by": "followee_id follows follower_id.",
			"positioned_at": "When following last became true; absent if it is false."},
		codes: map[string]string{codeSelfEdge: codeSelfFollow},
	}
}
